"""From the core's sampling parameters to vLLM's."""

from __future__ import annotations

import copy
import random
from functools import cache
from typing import Any

import numpy as np

from genlm.core.types import SampleRequest, SamplingParams, ScoreRequest
from genlm.vllm.capture import DRAW_KEY, ROW_KEY
from genlm.vllm.forks import SOURCE_KEY
from genlm.vllm.internals import EngineCore
from genlm.vllm.new_requests import READS_KEY

# vLLM raises lower temperatures to this one, and treats the very lowest as 0.
LOWEST_TEMPERATURE = 0.01
HIGHEST_TEMPERATURE = 2.0  # vLLM rejects higher temperatures
SEED_COUNT = 1 << 63

#: The seed of requests that draw the likeliest token. They need none, but without one the model
#: runner V2 would draw one from NumPy's global generator.
NO_DRAW: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "seed": 0}


def row_params(key: str, source: str | None = None) -> Any:
    """The parameters of a next-token row, captured under ``key``.

    vLLM must draw a token too; the likeliest one is the cheapest.

    Args:
        key: The key of the row.
        source: The id of a request of which this one is likely a fork.
    """
    # This skips vLLM's check of new parameters, which takes as long as a short step.
    params = copy.copy(_any_row())
    params.extra_args = {ROW_KEY: key} if source is None else {ROW_KEY: key, SOURCE_KEY: source}
    return params


@cache
def _any_row() -> Any:
    return _params({}, **NO_DRAW)


def score_params(key: str, request: ScoreRequest, shareable: int, *, by_id: bool) -> Any:
    """The parameters of a score: a row, captured under ``key``, and the log-probabilities of all
    tokens of the continuation but the last.

    Args:
        key: The key of the row.
        request: The score.
        shareable: How many leading tokens may be taken over from other requests.
        by_id: Whether vLLM accepts the ids of the scored tokens. Otherwise it returns the
            log-probabilities of all tokens that it computes.
    """
    wishes: dict[str, Any] = {"prompt_logprobs": 0}
    if by_id:
        scored = np.array(request.continuation[:-1], dtype=np.int32)[:, None]
        start = request.query.length - 1
        wishes = {"prompt_logprob_token_ids": scored, "prompt_logprob_start": start}
    return _params(
        {ROW_KEY: key, READS_KEY: shareable},
        skip_reading_prefix_cache=not shareable,
        **NO_DRAW,
        **wishes,
    )


def draw_params(key: str | None, params: SamplingParams, seeds: random.Random | None) -> Any:
    """The parameters of a sample.

    Args:
        key: The key under which NaN among its rows is noted; ``None`` if it is not looked for.
        params: The caller's sampling parameters.
        seeds: Makes the seeds of samples without one; ``None`` leaves them to vLLM.
    """
    seed = params.seed
    if seed is None and seeds is not None:
        seed = seeds.randrange(SEED_COUNT)
    return _params(
        {} if key is None else {DRAW_KEY: key},
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=None if seed is None else seed % SEED_COUNT,  # vLLM treats -1 as no seed
        stop_token_ids=sorted(params.stop_token_ids),
    )


def _params(wishes: dict[str, Any], **options: Any) -> Any:
    """vLLM's parameters, with arguments for the plugin's logits processor."""
    from vllm import SamplingParams as VllmSamplingParams

    ours = {"ignore_eos": True, "detokenize": False, "skip_clone": True}
    return VllmSamplingParams(extra_args=wishes, **ours, **options)


def drawn_ids(drawn: list[int], params: SamplingParams) -> list[int]:
    """The drawn ids, without the stop token."""
    return drawn[:-1] if drawn[-1] in params.stop_token_ids else drawn


def vllm_draws(request: SampleRequest, core: EngineCore) -> bool:
    """Whether vLLM draws from exactly the requested distribution, and reproducibly if there is a
    seed.

    It does not at temperatures that it raises or rejects. On a CPU, it also fails on a seeded
    prompt that it computes in chunks, as it may after preempting a sample.
    """
    params = request.params
    if params.seed is not None and core.device_type == "cpu":
        return False
    within = LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE
    return within or params.temperature == 0
