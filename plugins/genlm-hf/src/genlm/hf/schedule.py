"""The schedule: what one step computes of all that waits."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import Generic, TypeVar

from attrs import frozen

from genlm.hf.evaluator import Evaluator
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import Together

R = TypeVar("R")


@frozen
class StepPlan(Generic[R]):
    """What to compute in one step.

    Attributes:
        answered: The requests that it answers, which wait no longer.
        chunk: What it computes besides: the beginning of a further request; ``None`` for nothing.
    """

    answered: Mapping[R, TokenSequence]
    chunk: TokenSequence | None = None


class Schedule(Generic[R]):
    """Keeps what waits, and chooses what to compute, so that no request waits long for somebody
    else's long context.

    A step computes about ``size`` tokens. At most half of them are for the requests that lack
    least. The rest are for the requests in the order asked, and the first of them that lacks more
    gets as much of its context computed as there is room: a chunk. So a short request waits for
    little more than one chunk, and no request waits for ever behind others.

    What is known of an unfinished context is kept as that of any other. If it was evicted since,
    for lack of memory, the context is computed whole: it is not evicted a second time.

    Args:
        evaluator: Says what is known of sequences.
        size: The most tokens of a chunk.
    """

    def __init__(self, evaluator: Evaluator, size: int) -> None:
        self._evaluator = evaluator
        self._size = size
        self._waiting: dict[R, TokenSequence] = {}  # in the order asked
        self._begun: tuple[R, int] | None = None  # who had the last chunk, and where that stopped

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def add(self, requests: Mapping[R, TokenSequence]) -> None:
        """Requests wait."""
        self._waiting.update(requests)

    def drop(self, request: R) -> None:
        """A request waits no longer, if it did."""
        self._waiting.pop(request, None)
        if self._begun is not None and self._begun[0] == request:
            self._begun = None

    def clear(self) -> None:
        """Forget what waits."""
        self._waiting.clear()
        self._begun = None

    def next(self) -> StepPlan[R]:
        """Choose."""
        step = self._next()
        if len(step.answered) == len(self._waiting):
            self._waiting, self._begun = {}, None
        else:
            for request in step.answered:
                self.drop(request)
        return step

    def _next(self) -> StepPlan[R]:
        waiting = self._waiting
        if len(waiting) > self._size:  # each lacks a token at least: no more can be answered
            waiting = dict(islice(waiting.items(), self._size))
        lengths = [one.length for one in waiting.values()]
        if sum(lengths) <= self._size:
            return StepPlan(waiting)  # without a look at what is known
        found = self._evaluator.known([*waiting.values()])
        if sum(lengths) - sum(found) <= self._size:
            return StepPlan(waiting)
        known = dict(zip(waiting, found, strict=True))
        lacks = {request: one.length - known[request] for request, one in waiting.items()}
        chosen = _Chosen(waiting, known, self._size, self._evaluator.together())
        for request in sorted(waiting, key=lacks.__getitem__):
            if not chosen.takes(request, leaving=self._size - self._size // 2):
                break
        chunk = self._in_turn(chosen)
        return StepPlan({request: waiting[request] for request in chosen.requests}, chunk)

    def _in_turn(self, chosen: _Chosen[R]) -> TokenSequence | None:
        """Fill up in the order asked; the chunk of the first that does not fit."""
        left = [request for request in chosen.waiting if request not in chosen]
        for turn, request in enumerate(left):
            if chosen.takes(request):
                continue
            if self._divisible(request, chosen):
                return self._chunk(request, chosen)
            if turn == 0:
                chosen.take(request)
            return None
        return None

    def _divisible(self, request: R, chosen: _Chosen[R]) -> bool:
        """Whether a beginning of a context can be computed first."""
        begun, stop = self._begun or (None, 0)
        if begun == request and chosen.known[request] < stop:
            return False  # its beginning has been lost
        return self._evaluator.continues(chosen.waiting[request])

    def _chunk(self, request: R, chosen: _Chosen[R]) -> TokenSequence | None:
        if 2 * chosen.room < self._size:
            return None  # not worth it; the next time it is first
        sequence = chosen.waiting[request]
        stop = sequence.length - chosen.cost(request) + chosen.room
        self._begun = request, stop
        return TokenSequence(sequence.tokens.first(stop), sequence.adapter)


class _Chosen(Generic[R]):
    """The requests that a step answers, and how many tokens it can still compute.

    Attributes:
        requests: In the order chosen.
        room: The tokens left.
        waiting: All requests.
        known: How many leading tokens of each need not be computed.
        together: Says what one costs beside others.
    """

    def __init__(
        self,
        waiting: Mapping[R, TokenSequence],
        known: Mapping[R, int],
        room: int,
        together: Together[R],
    ) -> None:
        self.waiting = waiting
        self.known = known
        self.room = room
        self.requests: list[R] = []
        self._together = together

    def __contains__(self, request: R) -> bool:
        return self.waiting[request] in self._together

    def cost(self, request: R) -> int:
        """How many more tokens to compute for a request, beside those chosen."""
        sequence = self.waiting[request]
        _, known = self._together.leader(sequence, self.known[request])
        return sequence.length - known

    def takes(self, request: R, leaving: int = 0) -> bool:
        """Choose a request, if there is room for it and for ``leaving`` more tokens."""
        fits = self.cost(request) + leaving <= self.room
        if fits:
            self.take(request)
        return fits

    def take(self, request: R) -> None:
        """Choose a request."""
        self.room -= self.cost(request)
        self.requests.append(request)
        self._together.add(self.waiting[request], request)
