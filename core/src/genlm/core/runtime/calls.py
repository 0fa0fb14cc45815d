"""What callers wait for: calls, which make requests, and tasks of the engine thread."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from attrs import Factory, define

from genlm.core.copies import copies_of, is_row
from genlm.core.errors import EngineDeadError
from genlm.core.runtime.combiners import Combiner, EachCombiner, JointCombiner
from genlm.core.runtime.frames import let_go

T = TypeVar("T")

#: The future of a caller: of asyncio in a coroutine, of concurrent.futures in a plain thread.
Future = asyncio.Future[T] | concurrent.futures.Future[T]


class Call(Generic[T]):
    """A call of one caller: requests, the results that have come, and the future that waits.

    Args:
        requests: One at least.
        future: Gets what ``combine`` makes of the results, or the first error.
        combine: Makes what the caller gets, see :mod:`~genlm.core.runtime.combiners`.
        loop: The event loop of the future; ``None`` for a plain thread.
    """

    __slots__ = ("combine", "error", "future", "left", "loop", "requests", "results")

    #: The attributes of an :class:`EachCombiner`.
    each: Sequence[JointCombiner[Any]] = ()
    keeps_errors = False

    def __init__(
        self,
        requests: Sequence[Any],
        future: Future[T],
        combine: Combiner[T],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.requests = requests
        self.future = future
        self.combine = combine
        self.loop = loop
        self.left = len(requests)
        self.results: list[Any] = [None] * self.left
        self.error: Exception | None = None

    @property
    def gone(self) -> bool:
        """Whether its caller needs no more results: it was cancelled, or has an error."""
        return self.error is not None or self.future.done()

    def give(self, at: int, result: Any) -> bool:
        """Take the result of one of the requests. Returns whether it was the last, so that the call
        ends."""
        self.results[at] = result
        self.left -= 1
        return not self.left and self.error is None

    def fail(self, error: Exception) -> bool:
        """Take an error in place of a result. Returns whether the call ends with it."""
        if self.error is not None:
            return False
        self.error = error
        return True

    def combined(self) -> T | Exception:
        """The caller's result."""
        if self.error is not None:
            return self.error
        try:
            return self.combine(self.results)
        except Exception as error:  # there is no memory for the copy; only this caller fails
            return error


class EachCall(Call[list[T]]):
    """A call whose combiner makes something of each result by itself."""

    __slots__ = ("each", "keeps_errors")

    def __init__(
        self,
        requests: Sequence[Any],
        future: Future[list[T]],
        combine: EachCombiner[T],
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(requests, future, combine, loop)
        self.each, self.keeps_errors = combine.each, combine.keeps_errors

    def give(self, at: int, result: Any) -> bool:
        """Give a result. With ``each``, a call ends when the results have been combined."""
        return super().give(at, result) and not self.each


@define(eq=False)
class Task(Generic[T]):
    """A call to make on the engine thread, after all earlier requests have been answered."""

    make: Callable[[], T]
    keeps_frames: bool = False
    future: concurrent.futures.Future[T] = Factory(concurrent.futures.Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.make())
        except BaseException as error:
            if not self.keeps_frames:
                let_go(error)
            self.future.set_exception(error)
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise


#: The calls that wait for a request, each with the index of the result in the call.
Callers = list[tuple[Call[Any], int]]


def combined(
    calls: Sequence[Call[Any]], parts: Sequence[tuple[Call[Any], int]] = ()
) -> list[tuple[Call[Any], Any]]:
    """The result of each call that ends. Equal joint combiners compute theirs at once.

    Args:
        calls: Those that have all of their results, or an error.
        parts: The results that this step has brought to calls with an :class:`EachCombiner`. What
            is made of a result takes its place. Calls that end with an exception by this are added.
    """
    joint = [one for one in calls if one.error is None and isinstance(one.combine, JointCombiner)]
    for call, at in parts:
        if call.gone:
            call.results[at] = None
    parts = [
        (call, at)
        for call, at in parts
        if not (call.gone or isinstance(call.results[at], Exception))
    ]
    wanted: list[tuple[Any, Sequence[Any]]]
    wanted = [(call.combine, call.results) for call in joint]
    wanted += [(call.each[at], call.results[at : at + 1]) for call, at in parts]
    made = made_together(wanted)
    ended = [*calls]
    for (call, at), result in zip(parts, made[len(joint) :], strict=True):
        call.results[at] = result
        ends = isinstance(result, Exception) and not call.keeps_errors
        if ends and call.fail(result) and call.left:
            ended.append(call)
    of_calls = dict(zip(joint, made[: len(joint)], strict=True))
    return [(call, of_calls[call] if call in of_calls else call.combined()) for call in ended]


def made_together(wanted: Sequence[tuple[Any, Sequence[Any]]]) -> Sequence[Any]:
    """The results of joint combiners, or exceptions in their places."""
    alike = {combine.together for combine, _ in wanted}
    if len(alike) == 1:  # nearly always
        return called(alike.pop(), wanted)
    places = defaultdict[Any, list[int]](list)
    for place, (combine, _) in enumerate(wanted):
        places[combine.together].append(place)
    made: dict[int, Any] = {}
    for together, some in places.items():
        results = called(together, [wanted[place] for place in some])
        made.update(zip(some, results, strict=True))
    return [made[place] for place in range(len(wanted))]


def called(together: Any, wanted: Sequence[tuple[Any, Sequence[Any]]]) -> Sequence[Any]:
    """The results of one call of ``together``; if it raises, each combiner is called alone."""
    try:
        made: Sequence[Any] = together(wanted)
        if len(made) == len(wanted):
            return made
    except Exception:  # there is no memory for all copies; each is tried alone
        pass
    return [_made(*each) for each in wanted]


def _made(combine: Combiner[Any], results: Sequence[Any]) -> Any:
    try:
        return combine(results)
    except Exception as error:  # only this caller fails
        return error


def keep_own(given: Callers) -> None:
    """Replace the rows of calls that wait for further results by copies: views would keep all rows
    of their steps in memory, and an engine may write its next rows where it wrote these."""
    rows: Callers = []
    for call, at in given:
        if call.left and call.future.done():  # its caller has cancelled
            call.results[at] = None
        elif call.left and not call.each and is_row(call.results[at]):
            rows.append((call, at))
    with contextlib.suppress(Exception):  # there is no memory for the copies; the views stay
        own = copies_of([call.results[at] for call, at in rows])
        for (call, at), row in zip(rows, own, strict=True):
            call.results[at] = row
