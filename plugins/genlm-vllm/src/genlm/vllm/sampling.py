"""From the core's sampling parameters to vLLM's."""

from __future__ import annotations

from typing import Any

from genlm.core.types import SampleRequest, SamplingParams
from genlm.vllm.capture import ROW_KEY
from genlm.vllm.internals import EngineCore
from genlm.vllm.new_requests import READS_KEY

LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and treats the very lowest as 0
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses higher ones
SEEDS = 1 << 63


def row_params(key: str, **options: Any) -> Any:
    """One next-token row, captured under ``key``.

    vLLM must also draw a token: the likeliest, which is the cheapest.
    """
    return _params({ROW_KEY: key}, max_tokens=1, temperature=0.0, **options)


def score_params(key: str, reads: int) -> Any:
    """A row, and the log-probabilities of the prompt's tokens behind those that may be taken over
    from others, of which there are so many."""
    params = row_params(key, prompt_logprobs=0, skip_reading_prefix_cache=not reads)
    params.extra_args[READS_KEY] = reads
    return params


def draw_params(params: SamplingParams) -> Any:
    """One continuation."""
    return _params(
        {},
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=None if params.seed is None else params.seed % SEEDS,  # vLLM treats -1 as no seed
        stop_token_ids=sorted(params.stop_token_ids),
    )


def _params(wishes: dict[str, Any], **options: Any) -> Any:
    """vLLM's parameters, with wishes for our logits processor."""
    from vllm import SamplingParams as VllmSamplingParams

    ours = {"ignore_eos": True, "detokenize": False, "skip_clone": True}
    return VllmSamplingParams(extra_args=wishes, **ours, **options)


def drawn_ids(drawn: list[int], params: SamplingParams) -> list[int]:
    """What was drawn, without the stop token."""
    return drawn[:-1] if drawn[-1] in params.stop_token_ids else drawn


def vllm_draws(request: SampleRequest, core: EngineCore) -> bool:
    """Whether vLLM draws from exactly the requested distribution, and reproducibly if there is a
    seed.

    It does not at temperatures that it raises or refuses. And on a CPU it fails on a seeded prompt
    that it computes in chunks, also after it has preempted a draw.
    """
    params = request.params
    if params.seed is not None and core.device_type == "cpu":
        return False
    within = LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE
    return within or params.temperature == 0
