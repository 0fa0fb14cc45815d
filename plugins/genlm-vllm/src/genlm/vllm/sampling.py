"""From the core's sampling parameters to vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from attrs import frozen

from genlm.core.errors import EngineError
from genlm.core.types import Query, SamplingParams
from genlm.vllm.capture import ROW_KEY, WIDTH_KEY
from genlm.vllm.flights import Flight
from genlm.vllm.internals import EngineCore

LOWEST_TEMPERATURE = 0.01  # vLLM raises lower ones to this, and takes the very lowest for 0
HIGHEST_TEMPERATURE = 2.0  # vLLM refuses higher ones
SEEDS = 1 << 63


def row_params(key: int, *, scores: bool = False) -> Any:
    """One next-token row, captured under ``key``, and, if wanted, the log-probabilities of the
    prompt's tokens.

    vLLM must draw a token besides: the likeliest, which is the cheapest.
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
        seed=None if params.seed is None else params.seed % SEEDS,  # vLLM takes -1 for no seed
        stop_token_ids=sorted(params.stop_token_ids),
        ignore_eos=True,
        detokenize=False,
        skip_clone=True,
        extra_args={WIDTH_KEY: width},
    )


@frozen(eq=False)
class Draw:
    """One continuation to draw."""

    flight: Flight
    params: SamplingParams

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.flight.query.token_ids)

    def result(self) -> list[int]:
        """What was drawn, without the stop token."""
        if self.flight.failure is not None:
            raise EngineError(
                f"vLLM ended the request without drawing a token: {self.flight.failure}"
            )
        drawn = self.flight.drawn
        return drawn[:-1] if drawn[-1] in self.params.stop_token_ids else drawn


def vllm_draws(query: Query, params: SamplingParams, core: EngineCore) -> bool:
    """Whether vLLM draws from exactly the distribution that ``params`` describe, and reproducibly
    if they have a seed.

    Not at temperatures that it raises or refuses. And on CPU it fails on a seeded prompt that it
    must compute in chunks.
    """
    if params.temperature and not LOWEST_TEMPERATURE <= params.temperature <= HIGHEST_TEMPERATURE:
        return False
    chunked = len(query.token_ids) > core.max_num_batched_tokens
    return not (chunked and params.seed is not None and core.device_type == "cpu")


def batches(draws: Sequence[Draw], core: EngineCore) -> Iterator[Sequence[Draw]]:
    """Which draws vLLM may work on together: all; but with seeds on CPU only as many prompts as one
    step computes whole, and as many tokens as the cache holds to the end."""
    if core.device_type != "cpu" or all(draw.params.seed is None for draw in draws):
        yield draws
        return
    batch: list[Draw] = []
    step = held = 0
    for draw in draws:
        footprint = core.footprint(draw.prompt + draw.params.max_tokens)
        if batch and (
            step + draw.prompt > core.max_num_batched_tokens or held + footprint > core.kv_capacity
        ):
            yield batch
            batch, step, held = [], 0, 0
        batch.append(draw)
        step += draw.prompt
        held += footprint
    yield batch
