"""From the core's sampling parameters to vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from genlm.core.types import Query, SamplingParams
from genlm.vllm.capture import ROW_KEY, WIDTH_KEY
from genlm.vllm.internals import EngineCore

LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and takes the very lowest for 0
SEEDS = 1 << 63


def row_params(key: int) -> Any:
    """One next-token row, captured under ``key``. vLLM must draw a token besides: the likeliest, which is the cheapest."""
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, skip_clone=True, extra_args={ROW_KEY: key}
    )


def draw_params(params: SamplingParams, width: int) -> Any:
    """One continuation, of token ids below ``width``: the tokenizer's vocabulary, without the model's padding."""
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=None if params.seed is None else params.seed % SEEDS,  # vLLM takes -1 for no seed
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        extra_args={WIDTH_KEY: width},
    )


def vllm_draws(queries: Sequence[Query], params: Sequence[SamplingParams], core: EngineCore) -> bool:
    """Whether vLLM draws from exactly the distributions that ``params`` describe, and reproducibly where they say so.

    Not at temperatures that it would raise. And on CPU it fails on a seeded prompt that is computed in chunks.
    """
    if any(0 < wish.temperature < LOWEST_TEMPERATURE for wish in params):
        return False
    seeded = any(wish.seed is not None for wish in params)
    chunked = sum(len(query.token_ids) for query in queries) > core.max_num_batched_tokens
    return not (seeded and chunked and core.device_type == "cpu")
