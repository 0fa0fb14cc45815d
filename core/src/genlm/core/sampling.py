"""Drawing tokens from next-token rows: the sampler of every backend that has none of its own."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
from attrs import evolve, frozen
from numpy.typing import NDArray

from genlm.core.adapters import LoraName
from genlm.core.checks import integer, number, safe_repr
from genlm.core.errors import EngineError, InvalidOptionError
from genlm.core.types import SamplingParams, TokenIds

if TYPE_CHECKING:
    import torch

#: What draws without a seed come from. It has no state, so a forked child draws others.
ENTROPY = random.SystemRandom()


class SamplingOptions(TypedDict, total=False):
    """How to draw, as keywords: those of :meth:`AsyncLM.sample`, which says what each means."""

    eos_token_ids: Iterable[int] | None
    temperature: float
    seed: int | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    lora_name: LoraName


@frozen
class Particle:
    """A drawn continuation as a weighted particle, which :meth:`AsyncLM.sample_particles` gives.

    Its two log-probabilities are sums over all the tokens drawn, the stop token among them.

    Attributes:
        token_ids: The continuation, without the stop token.
        stop_token_id: The token that ended it; ``None`` where ``max_tokens`` did.
        logprob: The log-probability under the model: of the rows that ``next_token_logprobs``
            gives.
        proposal_logprob: That under what it was drawn from: the model after ``temperature``,
            ``top_k``, ``top_p`` and ``min_p``.
    """

    token_ids: TokenIds
    stop_token_id: int | None
    logprob: float
    proposal_logprob: float

    @property
    def log_weight(self) -> float:
        """The logarithm of the importance weight for the model as the target."""
        return self.logprob - self.proposal_logprob


class TokenDrawer:
    """Draws tokens from rows, one uniform number each, by inverting the cumulative distribution.

    With a seed the numbers come from a generator of its own: it fixes the draws, whatever else is
    going on.

    Attributes:
        logprob: Of all that has been drawn, under the rows.
        proposal_logprob: The same, under what it was drawn from.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.logprob = self.proposal_logprob = 0.0
        self._params = params
        self._uniform = (
            ENTROPY if params.seed is None else np.random.Generator(np.random.PCG64(params.seed))
        ).random

    def draw(self, row: torch.Tensor) -> int:
        """Draw one token id from ``row``, ``[vocab_size]`` float32 log-probabilities.

        Raises:
            EngineError: the row has no mass, or a NaN or +inf.
        """
        logprobs = row.detach().cpu().numpy()
        if not math.isfinite(logprobs.max()):
            raise EngineError(
                "the row to draw from has no mass, or a NaN or +inf; look at next_token_logprobs() "
                "of the context, and at wrappers that mask tokens"
            )
        if self._params.temperature == 0:
            token_id = int(np.argmax(logprobs))
        else:
            weights = self._weights(logprobs)
            mass = _cumulative(weights)
            # The first token whose cumulative mass exceeds the point, so that one without mass is
            # never drawn. There is one: of a mass of at least 1, a share below 1 is less than all.
            point = self._uniform() * mass[-1]
            token_id = int(np.searchsorted(mass, point, side="right"))
            self.proposal_logprob += math.log(weights[token_id] / mass[-1])
        self.logprob += float(logprobs[token_id])
        return token_id

    def _weights(self, logprobs: NDArray[np.float32]) -> NDArray[np.float64]:
        """What each token is drawn in proportion to: temperature, then top_k, then top_p of what
        remains, then min_p."""
        temperature, top_k = self._params.temperature, self._params.top_k
        top_p, min_p = self._params.top_p, self._params.min_p
        weights: NDArray[np.float64] = np.subtract(logprobs, logprobs.max(), dtype=np.float64)
        with np.errstate(all="ignore"):  # next to no temperature: -inf and 0 are what is meant
            if temperature != 1:
                weights /= temperature
            np.exp(weights, out=weights)
        # What is kept is told by the log-probabilities: extreme temperatures round different ones
        # to the same weight.
        if top_k is not None and top_k < len(weights):
            weights[~_likeliest(logprobs, top_k)] = 0
        if top_p is not None and top_p < 1:
            whole = weights.sum()
            # The others together have less than what is left out: most of a vocabulary.
            likely = weights[weights > (1 - top_p) * whole / len(weights)]
            mass = _cumulative(-np.sort(-likely))
            count = int(np.searchsorted(mass, top_p * whole, side="left")) + 1
            weights[~_likeliest(logprobs, min(count, len(likely)))] = 0
        if min_p is not None:
            weights[weights < min_p] = 0  # the greatest is 1
        return weights


def _cumulative(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Their cumulative sums; NumPy takes four times as long."""
    import torch

    mass: NDArray[np.float64] = torch.from_numpy(weights).cumsum(0).numpy()
    return mass


def _likeliest(logprobs: NDArray[np.float32], count: int) -> NDArray[np.bool_]:
    """Which tokens are the ``count`` most likely ones; of equal ones those of the lowest ids. Only
    values are sorted: to sort the ids of a vocabulary takes milliseconds."""
    place = len(logprobs) - count
    least = np.partition(logprobs, place)[place]
    kept: NDArray[np.bool_] = logprobs > least
    kept[np.flatnonzero(logprobs == least)[: count - np.count_nonzero(kept)]] = True
    return kept


def seed_of(seed: int | None, index: int) -> int | None:
    """The seed of the ``index``-th prompt of a batch: the seed itself for the first, independent
    ones for the others.

    Source: NumPy's ``SeedSequence``, made for independent streams from one seed.
    """
    if seed is None or index == 0:
        return seed
    return int(np.random.SeedSequence((seed, index)).generate_state(1, np.uint64)[0]) >> 1


def seeded(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The same ``n`` times, each with a seed of its own where there is one."""
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
        InvalidOptionError: it names the option, its value and what is accepted.
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
