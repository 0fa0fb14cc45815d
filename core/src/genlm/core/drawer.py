"""Drawing tokens from next-token rows: the sampler for backends without one of their own."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import EngineError
from genlm.core.runtime.combiners import JointCombiner
from genlm.core.types import SamplingParams

if TYPE_CHECKING:
    import torch

#: The source of samples without a seed. It has no state, so a forked child draws other numbers.
ENTROPY = random.SystemRandom()

#: How many numbers are processed at a time: on a CPU as many as its cache holds, on an accelerator
#: few compared with its memory.
CPU_CHUNK_NUMBERS, DEVICE_CHUNK_NUMBERS = 1 << 18, 1 << 22

#: The numbers of likeliest tokens that top_p considers first, so that a whole vocabulary is seldom
#: sorted.
TOP_P_CANDIDATES = (1 << 10, 1 << 14)


class TokenDrawer:
    """Draws the tokens of one continuation from rows, one uniform number each, by inverting the
    cumulative distribution.

    With a seed, the numbers come from a generator of the drawer's own. So the seed fixes the
    samples, whatever else happens.

    Attributes:
        how: The temperature, top_k, top_p and min_p.
        logprob: The log-probability of all drawn tokens, under the rows.
        proposal_logprob: Their log-probability under the distributions they were drawn from.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.how = params.temperature, params.top_k, params.top_p, params.min_p
        self.logprob = self.proposal_logprob = 0.0
        self._number: float | None = None
        self._uniform = (
            ENTROPY if params.seed is None else np.random.Generator(np.random.PCG64(params.seed))
        ).random

    def draw(self, row: torch.Tensor) -> int:
        """Draw one token id from ``row``, ``[vocab_size]`` float32 log-probabilities.

        Raises:
            EngineError: the row has no mass, or a NaN or +inf.
        """
        (drawn,) = draw_together([self], [row])
        if isinstance(drawn, Exception):
            raise drawn
        return drawn

    def number(self) -> float:
        """The uniform number for the next token; the same one until the token has been drawn."""
        if self._number is None:
            self._number = self._uniform()
        return self._number

    def take(
        self, greatest: float, token_id: float, logprob: float, proposal_logprob: float
    ) -> int | EngineError:
        """Note the drawn token."""
        self._number = None
        if not math.isfinite(greatest):
            return EngineError(
                "the row to draw from has no mass, or a NaN or +inf; look at next_token_logprobs() "
                "of the context, and at wrappers that mask tokens"
            )
        self.logprob += logprob
        self.proposal_logprob += proposal_logprob
        return int(token_id)


class Draw(JointCombiner[list[int]]):
    """Makes the result of a call for rows: one token drawn from each row.

    Args:
        drawers: One for each token.
        known: The rows that need not be requested; ``None`` in place of the others.
    """

    def __init__(
        self, drawers: Sequence[TokenDrawer], known: Sequence[torch.Tensor | None]
    ) -> None:
        self._drawers, self._known_rows = drawers, known

    @staticmethod
    def together(
        calls: Sequence[tuple[Draw, Sequence[torch.Tensor]]],
    ) -> list[list[int] | EngineError]:
        """The tokens of each call, or the first error."""
        drawers = [drawer for draw, _ in calls for drawer in draw._drawers]
        rows = [row for draw, results in calls for row in draw._rows(results)]
        drawn = iter(draw_together(drawers, rows))
        given: list[Any] = []
        for draw, _ in calls:
            own = [next(drawn) for _ in draw._drawers]
            given.append(next((one for one in own if isinstance(one, Exception)), own))
        return given

    def _rows(self, results: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        asked = iter(results)
        return (next(asked) if row is None else row for row in self._known_rows)


def draw_together(
    drawers: Sequence[TokenDrawer], rows: Sequence[torch.Tensor]
) -> list[int | EngineError]:
    """Draw a token from each row, or return what is wrong with the row. Rows with the same options
    are processed together, on their device, so that there is one wait for a GPU."""
    import torch

    alike = defaultdict[Any, list[int]](list)
    for at, drawer in enumerate(drawers):
        alike[drawer.how].append(at)
    order = [at for places in alike.values() for at in places]
    device = torch.device("cpu") if rows[0].is_mps else rows[0].device  # Metal has no float64
    numbers = torch.tensor([[drawers[at].number()] for at in order], dtype=torch.float64)
    if not on_cpu(device):
        numbers = numbers.to(device, non_blocking=True)
    some = max(1, (CPU_CHUNK_NUMBERS if on_cpu(device) else DEVICE_CHUNK_NUMBERS) // len(rows[0]))
    found: list[torch.Tensor] = []
    begin = 0
    for how, places in alike.items():
        stop = begin + len(places)
        for first in range(begin, stop, some):
            part = slice(first, min(first + some, stop))
            chosen = torch.stack([rows[at] for at in order[part]])
            found.append(_drawn(chosen.cpu() if chosen.is_mps else chosen, numbers[part], how))
        begin = stop
    # Noted after all samples have succeeded: after a failure, each is repeated with the same
    # number.
    values = torch.cat(found).tolist()
    drawn = {at: drawers[at].take(*one) for at, one in zip(order, values, strict=True)}
    return [drawn[at] for at in range(len(drawers))]


def on_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _drawn(
    rows: torch.Tensor,
    numbers: torch.Tensor,
    how: tuple[float, int | None, float | None, float | None],
) -> torch.Tensor:
    """Of each row its greatest value, the token drawn, and the token's log-probabilities under the
    row and under what it was drawn from: ``[len(rows), 4]`` float64.

    Args:
        rows: ``[n, vocab_size]`` log-probabilities.
        numbers: ``[n, 1]`` float64, uniform.
        how: Temperature, top_k, top_p and min_p.
    """
    import torch

    rows = rows.detach()
    greatest = rows.amax(-1, keepdim=True)
    if how[0] == 0:
        drawn, shares = rows.argmax(-1, keepdim=True), torch.ones_like(greatest).double()
    else:
        weights = _weights(rows, greatest, *how)
        mass = weights.cumsum(-1)
        whole = mass[:, -1:]
        # The first token whose cumulative mass exceeds the point is drawn, so that a token without
        # mass never is.
        drawn = torch.searchsorted(mass, numbers * whole, right=True)
        drawn.clamp_(max=rows.shape[-1] - 1)
        if not on_cpu(rows.device):  # sums computed in parallel may decrease in their last bits
            drawn = drawn.where(weights.gather(-1, drawn) > 0, rows.argmax(-1, keepdim=True))
        shares = weights.gather(-1, drawn) / whole
    return torch.cat([greatest, drawn, rows.gather(-1, drawn), shares.log()], -1)


def _weights(
    rows: torch.Tensor,
    greatest: torch.Tensor,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    min_p: float | None,
) -> torch.Tensor:
    """The weights by which tokens are drawn, float64: temperature, then top_k, then top_p of the
    remaining mass, then min_p."""

    def weigh(logprobs: torch.Tensor) -> torch.Tensor:
        weights = logprobs.double().sub_(greatest)
        if temperature != 1:
            # The temperature is bounded because a GPU multiplies by its inverse.
            weights /= min(max(temperature, 1e-300), 1e300)
        return weights.exp_()

    weights, width = weigh(rows), rows.shape[-1]
    few = width if top_k is None else min(top_k, width)
    # Log-probabilities decide which tokens are kept, because extreme temperatures round different
    # log-probabilities to the same weight.
    if top_p is not None and top_p < 1:
        _keep(weights, rows, *_nucleus(rows, weights, top_p, few, weigh))
    elif few < width:
        _keep(weights, rows, _ordered(rows, few)[:, -1:], few)
    if min_p is not None:
        weights.masked_fill_(weights < min_p, 0)  # the greatest weight is 1
    return weights


def _nucleus(
    rows: torch.Tensor,
    weights: torch.Tensor,
    top_p: float,
    top_k: int,
    weigh: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """The least log-probability of the likeliest tokens that have a share of ``top_p`` of the
    ``top_k`` likeliest together, and their number: each ``[n, 1]``."""
    import torch

    width = rows.shape[-1]
    for few in [*(few for few in TOP_P_CANDIDATES if few < top_k == width), top_k]:
        ordered = _ordered(rows, few)
        mass = weigh(ordered).cumsum(-1)
        whole = mass[:, -1:] if few == top_k else weights.sum(-1, keepdim=True)
        if few == top_k or bool((mass[:, -1:] >= top_p * whole).all()):
            break
    last = torch.searchsorted(mass, top_p * whole).clamp_(max=few - 1)
    return ordered.gather(-1, last), last + 1


def _keep(
    weights: torch.Tensor, rows: torch.Tensor, least: torch.Tensor, count: torch.Tensor | int
) -> None:
    """Set the weights of all but the ``count`` likeliest tokens of each row to 0. The last of these
    has the log-probability ``least``. Of equally likely tokens, those with the lowest ids are
    kept."""
    others = rows < least
    surplus = rows.shape[-1] - others.sum(-1, keepdim=True) - count
    if bool((surplus > 0).any()):
        equal = rows == least
        others |= equal & (equal.cumsum(-1) > equal.sum(-1, keepdim=True) - surplus)
    weights.masked_fill_(others, 0)


def _ordered(rows: torch.Tensor, few: int) -> torch.Tensor:
    """The ``few`` greatest values of each row, in descending order."""
    import torch

    if not on_cpu(rows.device):
        return rows.topk(few).values
    # This takes a third of PyTorch's time.
    greatest = np.partition(rows.numpy(), -few, axis=-1)[:, -few:]
    return torch.from_numpy(-np.sort(-greatest, axis=-1))
