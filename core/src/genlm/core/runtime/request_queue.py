"""The request queue: requests that the engine thread has not taken yet."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sized
from typing import Any, Generic, TypeVar, cast

from attrs import Factory, define

from genlm.core.errors import EngineDeadError
from genlm.core.runtime.timeline import Timeline

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")
T = TypeVar("T")


#: One caller waiting for one answer: in a coroutine, or in a plain thread.
Waiting = asyncio.Future[A] | concurrent.futures.Future[A]


#: Requests, in the order asked, each with its callers.
Pending = dict[R, list[Waiting[A]]]

#: The most passes of an event loop for one gathering, while each adds a request. Particles that
#: start together, or in waves one pass apart, have all asked after a few tens of passes; a loop
#: that asks in every pass never ends.
PASSES = 100


@define(eq=False)
class Lane:
    """Requests of one lane may be in flight together; those of different lanes may not.

    Attributes:
        name: For people.
        alone: Whether each of its requests is in flight alone.
    """

    name: str
    alone: bool = False


#: The lane of requests that any other may join.
ROWS = Lane("rows")


@define(eq=False)
class Gathering(Generic[R, A]):
    """What one event loop has asked since its last pass without a new request."""

    pending: Pending[R, A] = Factory(dict)
    asked: int = 0
    seen: int = 0  # how many had been asked one pass ago
    passes: int = 0


@define(eq=False)
class Task(Generic[T]):
    """A call to make on the engine thread, after everything asked before it has been answered."""

    call: Callable[[], T]
    future: concurrent.futures.Future[T] = Factory(concurrent.futures.Future)

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.call())
        except BaseException as error:
            self.future.set_exception(error)
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise


@define
class Counters:
    """What the batcher has done; written under its lock or by its thread alone."""

    requests: int = 0
    dedup_hits: int = 0
    cancelled: int = 0
    failed: int = 0


class RequestQueue(Generic[R, A]):
    """Requests and tasks in the order asked; equal requests share a place. The batcher calls it
    under its lock.

    Requests that may be in flight together are a lane. Within a lane the order is that of asking.
    Lanes take turns: while requests of one lane are in flight, more of that lane may join, until a
    request of another lane waits. So no request waits for ever. A task waits for everything asked
    before it, and everything asked after it waits for the task.

    Taking a request costs the same for any number that wait.

    Args:
        limit: The most requests in flight; ``None`` means no limit.
        timeline: Receives the time spent queueing.
        counters: Receive equal requests, and requests without callers.
    """

    def __init__(self, limit: int | None, timeline: Timeline, counters: Counters) -> None:
        #: Says which lane a request is in. Used by the engine thread, which sets it.
        self.lane_of: Callable[[R], Lane] = lambda request: ROWS
        self._limit = limit
        self._timeline = timeline
        self._counters = counters
        self._gatherings: dict[asyncio.AbstractEventLoop, Gathering[R, A]] = {}
        # Not sorted yet. Sorting stops at the first task.
        self._arrived: deque[Pending[R, A] | Task[Any]] = deque()
        # Requests before that task. The lane whose turn it is comes first.
        self._lanes: dict[Lane, OrderedDict[R, list[Waiting[A]]]] = {}
        self._in_flight = ROWS  # the lane of what is in flight, if anything is
        self._queued_since = 0.0  # by the timeline's clock; holds while requests are in the queue

    def __bool__(self) -> bool:
        """Whether there is something to take."""
        return bool(self._lanes or self._arrived)

    # --- what comes in ----------------------------------------------------------------------------

    def gathering(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Whether requests of this event loop are being held."""
        return loop in self._gatherings

    def gather(
        self, request: R, future: asyncio.Future[A], loop: asyncio.AbstractEventLoop
    ) -> None:
        """Hold a request until a pass of its event loop adds no other."""
        gathering = self._gatherings.get(loop)
        if gathering is None:
            for closed in [other for other in self._gatherings if other.is_closed()]:
                self.release(closed)  # its passes are over
            gathering = self._gatherings[loop] = Gathering()
        gathering.asked += 1
        waiting = gathering.pending.get(request)
        if waiting is None:
            gathering.pending[request] = [future]
        else:
            waiting.append(future)
            self._counters.dedup_hits += 1
        # A signal handler may have released the gathering at any line above, and waited for the
        # engine thread: then this request would be in nothing that is still to be taken.
        if self._gatherings.get(loop) is not gathering:
            self._put({request: [future]})

    def passed(self, loop: asyncio.AbstractEventLoop) -> bool:
        """A pass of the event loop is over. ``True`` if another pass must be waited for: this one
        added a request, and the batch is not full."""
        gathering = self._gatherings.get(loop)
        if gathering is None:
            return False
        grown, gathering.seen = gathering.asked > gathering.seen, gathering.asked
        gathering.passes += 1
        if grown and gathering.passes < PASSES and not self._fills(gathering.pending):
            return True
        self.release(loop)
        return False

    def release(self, loop: asyncio.AbstractEventLoop) -> None:
        """Put what one event loop has gathered into the queue."""
        self._put(self._gatherings.pop(loop).pending)

    def put(self, request: R, future: concurrent.futures.Future[A]) -> None:
        """Put a request into the queue."""
        self._put({request: [future]})

    def _put(self, asked: Pending[R, A]) -> None:
        if not self:
            self._queued_since = self._timeline.clock()
        self._arrived.append(asked)

    def put_task(self, task: Task[Any]) -> None:
        """Put a task into the queue, behind everything asked so far."""
        for loop in list(self._gatherings):
            self.release(loop)
        self._arrived.append(task)

    # --- what goes out ----------------------------------------------------------------------------

    def full(self) -> bool:
        """Whether a batch that begins now would not grow by waiting: it is full, or something that
        cannot join it also waits."""
        self.sort({})
        return bool(self._arrived) or len(self._lanes) != 1 or self._fills(*self._lanes.values())

    def sort(self, running: Pending[R, A]) -> None:
        """Put what has arrived, up to the first task, into lanes. A request equal to one in flight
        joins its callers."""
        while self._arrived and not isinstance(arrived := self._arrived[0], Task):
            self._arrived.popleft()
            for request, asked in arrived.items():
                waiting = running.get(request) if running else None
                if waiting is None:
                    lane = self.lane_of(request)
                    if (pending := self._lanes.get(lane)) is None:
                        pending = self._lanes[lane] = OrderedDict()
                    waiting = pending.setdefault(request, asked)
                if waiting is not asked:
                    waiting += asked
                    self._counters.dedup_hits += len(asked)

    def take(self, running: Pending[R, A], dropping: bool) -> Task[Any] | list[R]:
        """What is next: a task, alone and when nothing is running; or requests that may join those
        in flight, now in ``running``.

        Args:
            running: What is in flight.
            dropping: Whether the engine still has requests that the next step will drop.
        """
        newcomers: list[R] = []
        if self._lanes and not (running or dropping):
            while self._lanes and not newcomers:  # a lane may hold nothing but cancelled requests
                newcomers = self._admit(next(iter(self._lanes)), running)
        elif self._lanes.keys() == {self._in_flight}:
            newcomers = self._admit(self._in_flight, running)
        if self._arrived and not (self._lanes or running or dropping):
            return cast("Task[Any]", self._arrived.popleft())
        return newcomers

    def _admit(self, lane: Lane, running: Pending[R, A]) -> list[R]:
        """Move requests of one lane into ``running``, as many as fit, and return them."""
        newcomers: list[R] = []
        taken = self._timeline.clock()
        pending = self._lanes.pop(lane)
        while pending and not self._fills(running) and not (lane.alone and running):
            request, asked = pending.popitem(last=False)
            waiting = [future for future in asked if not future.done()]
            self._counters.cancelled += len(asked) - len(waiting)
            if waiting:
                running[request] = waiting
                newcomers.append(request)
        if pending:
            self._lanes[lane] = pending  # last: it is the other lanes' turn
        if newcomers:
            self._in_flight = lane
            self._timeline.add("queue", self._queued_since, requests=len(newcomers))
            self._queued_since = taken  # of the requests left in the queue, if any
        return newcomers

    def withdraw(self, tasks: bool = True) -> list[Waiting[Any]]:
        """Take back all requests; with ``tasks`` the tasks too."""
        for loop in list(self._gatherings):
            self.release(loop)
        # At once, because a signal handler may read it at any line.
        lanes, arrived, self._lanes, self._arrived = self._lanes, self._arrived, {}, deque()
        withdrawn: list[Waiting[Any]] = []
        for item in (*lanes.values(), *arrived):
            if not isinstance(item, Task):
                withdrawn += itertools.chain.from_iterable(item.values())
            elif tasks:
                withdrawn.append(item.future)
            else:
                self._arrived.append(item)
        return withdrawn

    def _fills(self, requests: Sized) -> bool:
        return self._limit is not None and len(requests) >= self._limit
