"""The schedule: which waiting requests one step computes."""

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
    """The sequences to compute in one step.

    Attributes:
        answered: The sequences that the step answers, with their requests, which no longer wait.
        chunk: The beginning of a further context, which the step also computes; ``None`` if there
            is none.
    """

    answered: Mapping[TokenSequence, R]
    chunk: TokenSequence | None = None


class Schedule(Generic[R]):
    """Keeps the waiting requests, and chooses what to compute, so that no request waits long for
    the long context of another one.

    The schedule decides which waiting requests a step answers, and of which other request it
    computes a chunk. The evaluator decides how sequences are computed; it says how many tokens of a
    sequence are known, and what one more sequence would cost.

    A step computes about ``size`` tokens. At most half of them are for the requests with the fewest
    missing tokens. The rest are for the requests in the order asked. The first of these that needs
    more tokens than are left gets a chunk: as many tokens of its context as there is room for. So a
    short request waits for little more than one chunk, and no request waits for ever.

    The state of an unfinished context is kept like that of any other context. If it has been
    evicted for lack of memory, the context is computed whole, so it is not evicted a second time.

    Args:
        evaluator: Says how many tokens of a sequence are known.
        size: The most tokens of a chunk.
    """

    def __init__(self, evaluator: Evaluator, size: int) -> None:
        self._evaluator = evaluator
        self._size = size
        self._waiting: dict[TokenSequence, R] = {}  # in the order asked
        # The sequence whose beginning was the last chunk, and where that chunk ended.
        self._begun: tuple[TokenSequence, int] | None = None

    def __bool__(self) -> bool:
        """Whether any request waits."""
        return bool(self._waiting)

    def add(self, requests: Mapping[TokenSequence, R]) -> None:
        """Let requests wait for their sequences."""
        self._waiting.update(requests)

    def drop(self, requests: Container[R]) -> None:
        """Drop these requests, if they wait."""
        self._waiting = {one: asks for one, asks in self._waiting.items() if asks not in requests}

    def clear(self) -> None:
        """Drop all waiting requests."""
        self._waiting.clear()
        self._begun = None

    def next(self) -> StepPlan[R]:
        """Choose the next step."""
        step = self._next()
        if len(step.answered) == len(self._waiting):
            self._waiting, self._begun = {}, None
        else:
            for one in step.answered:
                del self._waiting[one]
        return step

    def _next(self) -> StepPlan[R]:
        waiting = self._waiting
        if len(waiting) > self._size:  # each needs at least one token, so no more can be answered
            waiting = dict(islice(waiting.items(), self._size))
        lengths = [one.length for one in waiting]
        if sum(lengths) <= self._size:
            return StepPlan(waiting)  # so there is no need to look up known tokens
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
        """Choose further requests in the order asked; returns the chunk of the first request that
        does not fit."""
        left = [one for one in chosen.known if one not in chosen.sequences]
        for turn, one in enumerate(left):
            if chosen.takes(one):
                continue
            if self._divisible(one, chosen):
                chunk = self._chunk(one, chosen)
                for other in left[turn + 1 :]:
                    if chunk is not None and other.length <= chunk.length:
                        # A sequence inside the chunk costs nothing.
                        chosen.takes(other)
                return chunk
            if turn == 0:
                chosen.take(one)
            return None
        return None

    def _divisible(self, sequence: TokenSequence, chosen: _Chosen) -> bool:
        """Whether a chunk of a context can be computed before the rest."""
        begun, stop = self._begun or (None, 0)
        if begun is sequence and chosen.known[sequence] < stop:
            return False  # the state of its last chunk has been lost
        return self._evaluator.continues(sequence)

    def _chunk(self, sequence: TokenSequence, chosen: _Chosen) -> TokenSequence | None:
        if 2 * chosen.room < self._size:
            return None  # too short to be worth it; it is first in the next step
        stop = sequence.length - chosen.cost(sequence) + chosen.room
        self._begun = sequence, stop
        chunk = TokenSequence(sequence.tokens.first(stop), sequence.adapter)
        chosen.computes(chunk, chosen.known[sequence])
        chosen.room = 0
        return chunk


class _Chosen:
    """The sequences that a step answers, and how many tokens it can still compute.

    Attributes:
        sequences: The chosen sequences, in the order chosen.
        room: How many tokens the step can still compute.
        known: For each waiting sequence, how many leading tokens need not be computed.
    """

    def __init__(self, known: Mapping[TokenSequence, int], room: int, evaluator: Evaluator) -> None:
        self.known = known
        self.room = room
        self.sequences: dict[TokenSequence, None] = {}
        self._evaluator = evaluator
        self._batch_cost: BatchCost[TokenSequence] = evaluator.batch_cost()

    def cost(self, sequence: TokenSequence) -> int:
        """How many more tokens the step computes if this sequence is chosen too."""
        if self._evaluator.is_beyond(sequence.length):
            return sequence.length  # it is computed whole
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
        """Note that the step computes a sequence, of which ``known`` leading tokens are known."""
        if not self._evaluator.is_beyond(sequence.length):
            self._batch_cost.add(sequence, known, sequence)
