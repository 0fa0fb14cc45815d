"""From the core's sampling parameters to vLLM's."""

from __future__ import annotations

from typing import Any

from genlm.core.types import SampleRequest, SamplingParams
from genlm.vllm.capture import ROW_KEY, WIDTH_KEY
from genlm.vllm.in_flight import InFlightRequest, RequestsInFlight
from genlm.vllm.internals import EngineCore
from genlm.vllm.sessions import Sessions

LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and treats the very lowest as 0
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses higher ones
SEEDS = 1 << 63


def row_params(key: str, *, scores: bool = False) -> Any:
    """One next-token row, captured under ``key``, and, if wanted, the log-probabilities of the
    prompt's tokens.

    vLLM must also draw a token: the likeliest, which is the cheapest.
    """
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        prompt_logprobs=0 if scores else None,
        extra_args={ROW_KEY: key},
    )


def draw_params(params: SamplingParams, width: int) -> Any:
    """One continuation, of token ids below ``width``: the tokenizer's vocabulary, without the
    model's padding."""
    from vllm import SamplingParams as VllmSamplingParams

    return VllmSamplingParams(
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k or 0,
        top_p=1.0 if params.top_p is None else params.top_p,
        seed=None if params.seed is None else params.seed % SEEDS,  # vLLM treats -1 as no seed
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        extra_args={WIDTH_KEY: width},
    )


def drawn_ids(drawn: list[int], params: SamplingParams) -> list[int]:
    """What was drawn, without the stop token."""
    return drawn[:-1] if drawn[-1] in params.stop_token_ids else drawn


def vllm_draws(request: SampleRequest, core: EngineCore) -> bool:
    """Whether vLLM draws from exactly the requested distribution, and reproducibly if there is a
    seed.

    It does not at temperatures that it raises or refuses. And on a CPU it fails on a seeded prompt
    that it must compute in chunks.
    """
    params = request.params
    if params.temperature and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
        return False
    chunked = request.query.length > core.longest_chunk
    return not (chunked and params.seed is not None and core.device_type == "cpu")


def may_join(
    request: InFlightRequest, others: RequestsInFlight, core: EngineCore, sessions: Sessions
) -> bool:
    """Whether a request may join those in flight now.

    Always, except for seeds on a CPU: there vLLM fails on a seeded prompt that it computes in
    chunks, also after it has preempted a draw. So nothing joins a seeded draw that might exhaust
    the cache. And until its prompt is computed, the next step must have room for it and for
    everything else, because vLLM computes the new tokens of live sessions before new prompts. If
    vLLM ignores seeds in a step with requests without one, requests with and without a seed take
    turns.
    """
    if core.device_type != "cpu" or not len(others):
        return True
    if not (request.is_seeded or others.any_seeded):
        return True
    if not core.mixes_seeds and request.is_seeded != others.any_seeded:
        return False
    if others.tokens + request.tokens + sessions.pinned_tokens > core.kv_capacity:
        return False
    if not (request.is_seeded or others.awaits_seeded_prompt):
        return True
    new = request.prompt.length
    if request.resumable and (session := sessions.find(request.prompt)):
        new -= session.query.length
    whole = others.next_tokens + new <= core.max_num_batched_tokens
    return whole and len(others) + len(sessions) < core.max_num_seqs
