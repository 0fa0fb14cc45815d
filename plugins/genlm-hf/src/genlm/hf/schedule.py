"""The schedule: what one step computes of all that waits."""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import islice
from typing import Generic, TypeVar

from attrs import frozen

from genlm.hf.evaluator import Evaluator
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.kv.sharing import BatchCost

R = TypeVar("R")


@frozen
class StepPlan(Generic[R]):
    """What to compute in one step.

    Attributes:
        answered: What it answers, and the requests for that, which wait no longer.
        chunk: What it computes besides: the beginning of a further one; ``None`` for nothing.
    """

    answered: Mapping[TokenSequence, R]
    chunk: TokenSequence | None = None


class Schedule(Generic[R]):
    """Keeps what waits, and chooses what to compute, so that no request waits long for somebody
    else's long context.

    It decides which of the waiting requests a step answers, and of which other one it computes a
    chunk. It does not decide how these are computed: it asks the evaluator what is known and what
    one more would cost, and hands it the sequences.

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
        self._waiting: dict[TokenSequence, R] = {}  # in the order asked
        # Whose beginning the last chunk was, and where that stopped.
        self._begun: tuple[TokenSequence, int] | None = None

    def __bool__(self) -> bool:
        """Whether anything waits."""
        return bool(self._waiting)

    def add(self, requests: Mapping[TokenSequence, R]) -> None:
        """Requests wait for their sequences."""
        self._waiting.update(requests)

    def drop(self, requests: Container[R]) -> None:
        """These requests wait no longer, if they did."""
        self._waiting = {one: asks for one, asks in self._waiting.items() if asks not in requests}

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
            for one in step.answered:
                del self._waiting[one]
        return step

    def _next(self) -> StepPlan[R]:
        waiting = self._waiting
        if len(waiting) > self._size:  # each lacks a token at least: no more can be answered
            waiting = dict(islice(waiting.items(), self._size))
        lengths = [one.length for one in waiting]
        if sum(lengths) <= self._size:
            return StepPlan(waiting)  # without a look at what is known
        found = self._evaluator.known([*waiting])
        if sum(lengths) - sum(found) <= self._size:
            return StepPlan(waiting)
        known = dict(zip(waiting, found, strict=True))
        chosen = _Chosen(known, self._size, self._evaluator)
        for one in sorted(waiting, key=lambda one: one.length - known[one]):
            if not chosen.takes(one, leaving=self._size - self._size // 2):
                break
        chunk = self._in_turn(chosen)
        return StepPlan({one: waiting[one] for one in chosen.sequences}, chunk)

    def _in_turn(self, chosen: _Chosen) -> TokenSequence | None:
        """Fill up in the order asked; the chunk of the first that does not fit."""
        left = [one for one in chosen.known if one not in chosen.sequences]
        for turn, one in enumerate(left):
            if chosen.takes(one):
                continue
            if self._divisible(one, chosen):
                chunk = self._chunk(one, chosen)
                for other in left[turn + 1 :]:
                    if chunk is not None and other.length <= chunk.length:
                        chosen.takes(other)  # if it is inside of the chunk
                return chunk
            if turn == 0:
                chosen.take(one)
            return None
        return None

    def _divisible(self, sequence: TokenSequence, chosen: _Chosen) -> bool:
        """Whether a beginning of a context can be computed first."""
        begun, stop = self._begun or (None, 0)
        if begun is sequence and chosen.known[sequence] < stop:
            return False  # its beginning has been lost
        return self._evaluator.continues(sequence)

    def _chunk(self, sequence: TokenSequence, chosen: _Chosen) -> TokenSequence | None:
        if 2 * chosen.room < self._size:
            return None  # not worth it; the next time it is first
        stop = sequence.length - chosen.cost(sequence) + chosen.room
        self._begun = sequence, stop
        chunk = TokenSequence(sequence.tokens.first(stop), sequence.adapter)
        chosen.computes(chunk, chosen.known[sequence])
        chosen.room = 0
        return chunk


class _Chosen:
    """What a step answers, and how many tokens it can still compute.

    Attributes:
        sequences: Those chosen, in that order.
        room: The tokens left.
        known: How many leading tokens need not be computed, of each that waits.
    """

    def __init__(self, known: Mapping[TokenSequence, int], room: int, evaluator: Evaluator) -> None:
        self.known = known
        self.room = room
        self.sequences: dict[TokenSequence, None] = {}
        self._evaluator = evaluator
        self._batch_cost: BatchCost[TokenSequence] = evaluator.batch_cost()

    def cost(self, sequence: TokenSequence) -> int:
        """How many more tokens to compute for a sequence, beside those chosen."""
        if self._evaluator.is_beyond(sequence.length):
            return sequence.length  # by itself
        _, known = self._batch_cost.leader(sequence, self.known[sequence])
        return sequence.length - known

    def takes(self, sequence: TokenSequence, leaving: int = 0) -> bool:
        """Choose a sequence, if there is room for it and for ``leaving`` more tokens."""
        fits = self.cost(sequence) + leaving <= self.room
        if fits:
            self.take(sequence)
        return fits

    def take(self, sequence: TokenSequence) -> None:
        """Choose a sequence."""
        self.room -= self.cost(sequence)
        self.sequences[sequence] = None
        self.computes(sequence, self.known[sequence])

    def computes(self, sequence: TokenSequence, known: int) -> None:
        """The step computes this, of which so many leading tokens are known."""
        if not self._evaluator.is_beyond(sequence.length):
            self._batch_cost.add(sequence, known, sequence)
