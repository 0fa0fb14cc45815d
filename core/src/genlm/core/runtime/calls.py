"""What callers wait for: answers to requests, and tasks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from attrs import Factory, define

from genlm.core.errors import EngineDeadError
from genlm.core.runtime.timeline import Timeline

R = TypeVar("R")
A = TypeVar("A")
T = TypeVar("T")

#: How a caller waits: in a coroutine, or in a plain thread.
Future = asyncio.Future[T] | concurrent.futures.Future[T]


class Call(Generic[R, A, T]):
    """One caller, who waits for the answers to some requests.

    Args:
        requests: One at least.
        future: Gets what ``combine`` makes of the answers, or the first error.
        combine: Makes the result, on the engine thread. Answers are shared with other callers and
            with the cache, so it copies them.
    """

    __slots__ = ("answers", "combine", "error", "future", "left", "requests")

    def __init__(
        self, requests: Sequence[R], future: Future[T], combine: Callable[[Sequence[A]], T]
    ) -> None:
        self.requests = requests
        self.future = future
        self.combine = combine
        self.answers: Any = None
        self.left = len(requests)
        self.error: Exception | None = None

    def places(self) -> Sequence[Place[A]]:
        """For each request, what its answer is given to."""
        if self.left == 1:
            return (self,)
        self.answers = [None] * self.left
        return [Part(self, at) for at in range(self.left)]

    def give(self, answer: A) -> bool:
        """Take the answer to the only request. Returns whether the call ends with it."""
        self.answers = (answer,)
        return self.error is None

    def fail(self, error: Exception) -> bool:
        """Take an error in place of an answer. Returns whether the call ends with it."""
        if self.error is not None:
            return False
        self.error = error
        return True

    @property
    def call(self) -> Call[R, A, T]:
        return self

    def result(self) -> T | Exception:
        """What the caller gets."""
        if self.error is not None:
            return self.error
        try:
            return self.combine(self.answers)
        except Exception as error:  # no memory for the copy: only this caller fails
            return error


class Part(Generic[A]):
    """A place in a call of several requests."""

    __slots__ = ("at", "call", "future")

    def __init__(self, call: Call[Any, A, Any], at: int) -> None:
        self.call = call
        self.at = at
        self.future = call.future

    def give(self, answer: A) -> bool:
        """Take an answer. Returns whether the call ends with it: whether it was the last."""
        call = self.call
        call.answers[self.at] = answer
        call.left -= 1
        return not call.left and call.error is None

    def fail(self, error: Exception) -> bool:
        return self.call.fail(error)


Place = Call[Any, A, Any] | Part[A]


@define(eq=False)
class Task(Generic[T]):
    """A call to make on the engine thread, after everything asked before it has been answered."""

    make: Callable[[], T]
    future: concurrent.futures.Future[T] = Factory(concurrent.futures.Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.make())
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise


def deliver(outcomes: Iterable[tuple[Future[Any], Any]], timeline: Timeline) -> None:
    """Give futures their result, or the error in its place. Each is resolved in its own event loop,
    and each loop is woken once."""
    began = timeline.clock()
    by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Future[Any], Any]]] = {}
    for outcome in outcomes:
        future = outcome[0]
        loop = None if isinstance(future, concurrent.futures.Future) else future.get_loop()
        if (of_loop := by_loop.get(loop)) is None:
            of_loop = by_loop[loop] = []
        of_loop.append(outcome)
    for loop, of_loop in by_loop.items():
        if loop is None:
            _resolve(of_loop, timeline, began)
        else:
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                loop.call_soon_threadsafe(_resolve, of_loop, timeline, began)


def _resolve(outcomes: Sequence[tuple[Future[Any], Any]], timeline: Timeline, began: float) -> None:
    for future, result in outcomes:
        try:
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            continue  # its caller has gone
        except TypeError as refused:
            # An asyncio future takes no StopIteration; the futures after it must not wait for ever
            refused.__cause__ = result
            future.set_exception(refused)
    timeline.add("delivery", began, answers=len(outcomes))


def another(error: Exception) -> Exception:
    """A copy of an error for a further caller: if several tasks raise one object, each sees the
    frames of the others."""
    try:
        own = copy.copy(error)
        same = str(own) == str(error)
    except Exception:  # some classes cannot be made from their ``args``, or have no text
        return error
    own.__cause__ = error.__cause__
    return own if same else error


def the_copy(answers: Sequence[Any]) -> Any:
    """The caller's own copy of the one answer that was asked: a row or scores, or ``None`` for no
    native scores."""
    (answer,) = answers
    return None if answer is None else answer.clone()
