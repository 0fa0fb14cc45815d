"""Handing out answers: each future is resolved in its own event loop, and each loop is woken once
for a whole batch."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from genlm.core.runtime.request_queue import Counters, Waiting
from genlm.core.runtime.timeline import Timeline

A = TypeVar("A")


class Delivery(Generic[A]):
    """Hands out answers and errors. For any thread.

    Args:
        share: Copies an answer for a further caller.
        counters: Receive failures.
        timeline: Receives the time spent delivering.
    """

    def __init__(self, share: Callable[[A], A], counters: Counters, timeline: Timeline) -> None:
        self._share = share
        self._counters = counters
        self._timeline = timeline

    def answer(self, answers: Iterable[tuple[Sequence[Waiting[A]], A | Exception]]) -> None:
        """Give an answer, or the error in its place, to all callers who wait for it."""
        outcomes: list[tuple[Waiting[A], A | Exception]] = []
        try:
            for waiting, answer in answers:
                outcomes.append((waiting[0], answer))
                if len(waiting) > 1:
                    outcomes += [(other, self._copy(answer)) for other in waiting[1:]]
        finally:
            self._resolve(outcomes)

    def fail(self, futures: Iterable[Waiting[Any]], error: Callable[[], Exception]) -> None:
        """Give each caller an error of its own."""
        self._resolve([(future, error()) for future in futures])

    def _copy(self, answer: A | Exception) -> A | Exception:
        try:
            return another(answer) if isinstance(answer, Exception) else self._share(answer)
        except Exception as error:  # no memory for one more copy: only this caller fails
            return error

    def _resolve(self, outcomes: Iterable[tuple[Waiting[Any], Any]]) -> None:
        began = self._timeline.clock()
        by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Waiting[Any], Any]]] = {}
        for resolved in outcomes:
            future, outcome = resolved
            loop = None if isinstance(future, concurrent.futures.Future) else future.get_loop()
            if (of_loop := by_loop.get(loop)) is None:
                of_loop = by_loop[loop] = []
            of_loop.append(resolved)
            if isinstance(outcome, Exception):
                self._counters.failed += 1
        for loop, of_loop in by_loop.items():
            if loop is None:
                resolve(of_loop, self._timeline, began)
            else:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(resolve, of_loop, self._timeline, began)


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


def resolve(resolved: Sequence[tuple[Waiting[Any], Any]], timeline: Timeline, began: float) -> None:
    """Give each future its answer or error, unless its caller has gone."""
    for future, answer in resolved:
        try:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            continue
        except TypeError as refused:
            # An asyncio future takes no StopIteration; the futures after it must not wait for ever
            refused.__cause__ = answer
            future.set_exception(refused)
    timeline.add("delivery", began, answers=len(resolved))


async def results_of(futures: Sequence[asyncio.Future[A]]) -> list[A]:
    """The results of futures that are resolved together, in order; ``asyncio.gather`` would call
    back for each.

    Raises:
        Exception: the first error; futures that are not done yet are cancelled.
    """
    try:
        return [await future for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()  # one that is done with an error no longer complains either
        raise
