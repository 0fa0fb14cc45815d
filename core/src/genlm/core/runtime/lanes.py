"""The queue of the engine thread: tasks, and the requests of calls, in lanes."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import math
import traceback
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from attrs import Factory, define

from genlm.core.copies import copies_of, is_row
from genlm.core.errors import EngineDeadError, PluginError
from genlm.core.runtime.combiners import Combiner, EachCombiner, JointCombiner
from genlm.core.runtime.timeline import Timeline

T = TypeVar("T")

#: The future of a caller: of asyncio in a coroutine, of concurrent.futures in a plain thread.
Future = asyncio.Future[T] | concurrent.futures.Future[T]


class Call(Generic[T]):
    """One caller, who waits for the results of some requests.

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
        """The same. With ``each``, a call ends when the results have been combined."""
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


#: The code flags of generators and coroutines, which may continue after an error.
MAY_GO_ON = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def let_go(error: BaseException) -> None:
    """Drop the local variables of the calls that an error and its causes have ended; their lines
    stay. The engine's calls hold what it was computing, and errors live long: programs gather them,
    and the garbage collector finds circles late. Errors of plugins stay as they are, because their
    authors want to look into the calls."""
    met: dict[int, BaseException] = {}
    left: list[BaseException | None] = [] if isinstance(error, PluginError) else [error]
    while left:
        one = left.pop()
        if one is None or id(one) in met:
            continue
        met[id(one)] = one
        left += [one.__cause__, one.__context__]
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if not frame.f_code.co_flags & MAY_GO_ON:
                with contextlib.suppress(RuntimeError):  # the frame has not ended
                    frame.clear()


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


#: Requests in the order in which they were made, each with its callers.
Pending = dict[Any, Callers]


def first_of(pending: Pending, room: float) -> tuple[Pending, Pending]:
    """Divide requests into the first ``room`` ones and the others."""
    if len(pending) <= room:
        return pending, {}
    # Taking the first item of an OrderedDict costs the same for any number of items.
    others = pending if isinstance(pending, OrderedDict) else OrderedDict(pending)
    return dict(others.popitem(last=False) for _ in range(int(room))), others


@define(eq=False)
class Lane:
    """Requests of one lane may be in flight together; those of different lanes may not.

    Attributes:
        name: The name in messages.
        alone: Whether each of its requests is in flight alone.
    """

    name: str
    alone: bool = False


#: The lane of requests that may be in flight with any other, and the lane of requests that failed
#: together.
ROWS, SUSPECTS = Lane("rows"), Lane("suspects", alone=True)


#: Counters, named as in :class:`~genlm.core.types.Stats`. Counters of requests and callers are
#: written under the batcher's lock or by the engine thread, the others by the engine thread only.
Counters = Counter[str]


class Lanes:
    """Requests and tasks in the order asked; equal requests share a place. The batcher calls it
    under its lock.

    Within a lane the order is that of asking. Lanes take turns: while requests of one lane are in
    flight, more of that lane may join, until a request of another lane waits. So no request waits
    for ever. A task waits for everything asked before it, and everything asked after it waits for
    the task. Suspects come before all others, one by one.

    Taking a request costs the same for any number that wait.

    Args:
        limit: The most requests in flight; ``None`` means no limit.
        timeline: Receives the time spent queueing.
        counters: Receive equal requests, and requests without callers.
    """

    def __init__(self, limit: int | None, timeline: Timeline, counters: Counters) -> None:
        #: The lane of a request. The engine thread sets and uses this.
        self.lane_of: Callable[[Any], Lane] = lambda request: ROWS
        #: The requests in flight. Used by the engine thread only.
        self.in_flight: Pending = {}
        self._lane = ROWS  # the lane of the requests in flight, if there are any
        self.limit = math.inf if limit is None else limit
        self._timeline = timeline
        self._counters = counters
        # Calls and tasks that are not sorted into lanes yet. Sorting stops at the first task.
        self._arrived: deque[Call[Any] | Task[Any]] = deque()
        # The requests before that task, by lane. The lane whose turn it is comes first.
        self._lanes: dict[Lane, Pending] = {}
        self._queued_since = 0.0  # by the timeline's clock; valid while requests wait

    def put(self, asked: Call[Any] | Task[Any]) -> None:
        """Add the requests of a call at the end of the queue."""
        if not (self._lanes or self._arrived):
            self._queued_since = self._timeline.clock()
        self._arrived.append(asked)

    def suspect(self, requests: Pending) -> None:
        """Put back requests of which one has made a step fail."""
        self._lanes = {SUSPECTS: requests, **self._lanes}

    def full(self) -> bool:
        """Whether waiting cannot make the next batch larger, because it is full, or because
        something that cannot join it also waits."""
        self._sort()
        if self._arrived or len(self._lanes) != 1:
            return True
        (waiting,) = self._lanes.values()
        return len(waiting) >= self.limit

    def take(self, dropping: bool) -> Task[Any] | list[Any]:
        """Take the next work: a task, alone and when nothing is in flight; or requests that may
        join those in flight.

        Args:
            dropping: Whether the engine still has requests that the next step will drop.
        """
        if self._arrived:
            self._sort()
        new_requests: list[Any] = []
        if self._lanes and not (self.in_flight or dropping):
            # A lane may contain only cancelled requests.
            while self._lanes and not new_requests:
                new_requests = self._admit(next(iter(self._lanes)))
        elif self._lanes.keys() == {self._lane}:
            new_requests = self._admit(self._lane)
        if self._arrived and not (self._lanes or self.in_flight or dropping):
            task = self._arrived.popleft()
            assert isinstance(task, Task)
            return task
        return new_requests

    def _sort(self) -> None:
        """Put all calls that have arrived before the first task into lanes. A request that equals
        one in flight, or a suspect, joins the callers of that request."""
        suspects = self._lanes.get(SUSPECTS)
        while self._arrived and not isinstance(arrived := self._arrived[0], Task):
            self._arrived.popleft()
            for at, request in enumerate(arrived.requests):
                callers = self.in_flight.get(request) if self.in_flight else None
                if callers is None and suspects is not None:
                    callers = suspects.get(request)
                if callers is None:
                    lane = self.lane_of(request)
                    if (waiting := self._lanes.get(lane)) is None:
                        waiting = self._lanes[lane] = {}
                    mine = [(arrived, at)]
                    if (callers := waiting.setdefault(request, mine)) is mine:
                        continue
                callers.append((arrived, at))
                self._counters["dedup_hits"] += 1

    def _admit(self, lane: Lane) -> list[Any]:
        """Put requests of one lane in flight, as many as fit, and return them."""
        new_requests: list[Any] = []
        taken = self._timeline.clock()
        pending = self._lanes.pop(lane)
        most = 1 if lane.alone else self.limit
        while pending and len(self.in_flight) < most:
            joining, pending = first_of(pending, most - len(self.in_flight))
            self._leave_out_cancelled(joining)
            self.in_flight.update(joining)
            new_requests += joining
        if pending:  # last, so that other lanes get their turn; suspects go on
            self._lanes[lane] = pending
            if lane is SUSPECTS:
                self._lanes = {lane: pending, **self._lanes}
        if new_requests:
            self._lane = lane
            self._timeline.add("queue", self._queued_since, requests=len(new_requests))
            self._queued_since = taken  # for the requests that still wait, if any
        return new_requests

    def _leave_out_cancelled(self, joining: Pending) -> None:
        """Drop callers that need no more results, and requests without callers."""
        cancelled = [
            request
            for request, callers in joining.items()
            if callers[0][0].gone or any(call.gone for call, _ in callers[1:])
        ]
        for request in cancelled:
            asked = joining[request]
            callers = [caller for caller in asked if not caller[0].gone]
            self._counters["cancelled"] += len(asked) - len(callers)
            if callers:
                joining[request] = callers
            else:
                del joining[request]

    def drop(self) -> list[Any]:
        """Remove the requests that no caller needs any more from flight, and return them."""
        dropped = [
            request
            for request, callers in self.in_flight.items()
            if callers[0][0].gone and all(call.gone for call, _ in callers)
        ]
        for request in dropped:
            self._counters["cancelled"] += len(self.in_flight.pop(request))
        return dropped

    def withdraw(self, tasks: bool = True) -> Callers:
        """Remove all waiting requests, with ``tasks`` also the tasks, and return them, each task as
        a call of its own."""
        # In one statement, because a signal handler may read the lanes at any line.
        lanes, arrived, self._lanes, self._arrived = self._lanes, self._arrived, {}, deque()
        withdrawn = [
            caller for lane in lanes.values() for callers in lane.values() for caller in callers
        ]
        for item in arrived:
            if not isinstance(item, Task):
                withdrawn += ((item, at) for at in range(len(item.requests)))
            elif tasks:
                withdrawn.append((Call((item,), item.future, list), 0))
            else:
                self._arrived.append(item)
        return withdrawn
