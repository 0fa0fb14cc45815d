"""Sampling: options, their checks, seeds, and weighted particles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypedDict

import numpy as np
from attrs import evolve, frozen

from genlm.core.adapters import LoraName
from genlm.core.checks import integer, number, safe_repr
from genlm.core.errors import InvalidOptionError
from genlm.core.types import SamplingParams, TokenIds


class SamplingOptions(TypedDict, total=False):
    """Keywords that say how to draw; :meth:`AsyncLM.sample` explains each."""

    temperature: float
    seed: int | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    lora_name: LoraName


@frozen
class Particle:
    """A drawn continuation as a weighted particle, which :meth:`AsyncLM.sample_particles` gives.

    Both log-probabilities are sums over all drawn tokens, the stop token included, in nats.

    Attributes:
        token_ids: The continuation, without the stop token.
        stop_token_id: The stop token that ended it; ``None`` if it ended at ``max_tokens``.
        logprob: The log-probability under the model, that is, by the rows of
            ``next_token_logprobs``.
        proposal_logprob: The log-probability under the distribution that it was drawn from: the
            model after ``temperature``, ``top_k``, ``top_p`` and ``min_p``.
    """

    token_ids: TokenIds
    stop_token_id: int | None
    logprob: float
    proposal_logprob: float

    @property
    def log_weight(self) -> float:
        """The logarithm of the importance weight for the model as the target."""
        return self.logprob - self.proposal_logprob


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of the ``index``-th prompt of a batch: the seed itself for the first, independent
    ones for the others.

    Source: NumPy's ``SeedSequence``, made for independent streams from one seed.
    """
    if seed is None or index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]) >> 1


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """``n`` copies of the parameters, each with a seed of its own if there is a seed."""
    return [evolve(params, seed=seed_of(params.seed, index)) for index in range(n)]


def checked_params(
    max_tokens: Any,
    eos_token_ids: Iterable[int],
    temperature: Any = 1.0,
    seed: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
) -> SamplingParams:
    """Check a user's sampling options.

    Raises:
        InvalidOptionError: names the option, its value and the accepted values.
    """
    return SamplingParams(
        max_tokens=integer("max_tokens", max_tokens, least=0),
        stop_token_ids=frozenset(
            integer("each of eos_token_ids", t, least=0) for t in _iterable(eos_token_ids)
        ),
        temperature=number("temperature", temperature, "of at least 0", lambda t: t >= 0),
        seed=integer("seed", seed, least=0, optional=True),
        top_k=integer("top_k", top_k, least=1, optional=True),
        top_p=None
        if top_p is None
        else number("top_p", top_p, "above 0 and at most 1, or None", lambda p: 0 < p <= 1),
        min_p=None
        if min_p is None
        else number("min_p", min_p, "from 0 to 1, or None", lambda p: 0 <= p <= 1),
    )


def _iterable(eos_token_ids: Any) -> Iterable[Any]:
    text = isinstance(eos_token_ids, str | bytes)
    if text or not isinstance(eos_token_ids, Iterable) or getattr(eos_token_ids, "ndim", 1) == 0:
        raise InvalidOptionError(
            "eos_token_ids must be a list of token ids, [] for none; "
            f"got {safe_repr(eos_token_ids)}"
        )
    return eos_token_ids
