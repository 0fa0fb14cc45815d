"""The intake: what has been asked and not been taken by the engine thread yet."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections import deque
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

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

#: The most passes of an event loop that a gathering lasts while each adds something. Particles that
#: start together, or in waves a pass apart, are all there after a few tens; a loop that asks
#: something new in every pass is never done.
PASSES = 100


@define(eq=False)
class Gathering(Generic[R, A]):
    """What one event loop has asked since its last quiet pass."""

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

    questions: int = 0
    dedup_hits: int = 0
    cancelled: int = 0
    failed: int = 0


class RequestQueue(Generic[R, A]):
    """Requests and tasks in the order asked; equal requests share a place. The batcher calls it
    under its lock.

    Args:
        kind: Requests may be in flight together only if their kinds are equal.
        limit: The most requests in flight; ``None`` is no limit.
        timeline: Told of the time spent queueing.
        counters: Told of equal requests, and of callers that do not wait any more.
    """

    def __init__(
        self,
        kind: Callable[[R], Hashable],
        limit: int | None,
        timeline: Timeline,
        counters: Counters,
    ) -> None:
        self._kind = kind
        self._limit = limit
        self._timeline = timeline
        self._counters = counters
        self._gatherings: dict[asyncio.AbstractEventLoop, Gathering[R, A]] = {}
        # A task is a barrier between requests.
        self._queue: deque[Pending[R, A] | Task[Any]] = deque()
        self._queued_since = 0.0  # by the timeline's clock; holds while requests are in the queue

    def __bool__(self) -> bool:
        """Whether there is something to take."""
        return bool(self._queue)

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

    def passed(self, loop: asyncio.AbstractEventLoop) -> bool:
        """A pass of the event loop is over. ``True`` if another one must be waited for, because
        this one added something to what does not fill a batch yet."""
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
        if not self._queue:
            self._queued_since = self._timeline.clock()
        last = self._queue[-1] if self._queue else None
        if not isinstance(last, dict):
            self._queue.append(asked)
            return
        for request, futures in asked.items():
            waiting = last.setdefault(request, futures)
            if waiting is not futures:
                waiting += futures
                self._counters.dedup_hits += len(futures)

    def put_task(self, task: Task[Any]) -> None:
        """Put a task into the queue, behind everything asked so far."""
        for loop in list(self._gatherings):
            self.release(loop)
        self._queue.append(task)

    # --- what goes out ----------------------------------------------------------------------------

    def full(self) -> bool:
        """Whether a batch that begins now would not grow by waiting: it has its limit, or a task
        stands behind it."""
        first = self._queue[0] if self._queue else None
        if len(self._queue) != 1 or not isinstance(first, dict):
            return True
        return self._fills(first)

    def take(self, running: Pending[R, A]) -> Task[Any] | list[R]:
        """A task, alone and when nothing is running; or requests, now in ``running``, that may join
        what is."""
        first = self._queue[0] if self._queue else {}
        if not isinstance(first, Task):
            return self._admit(first, running)
        if running:
            return []
        self._queue.popleft()
        return first

    def withdraw(self, tasks: bool = True) -> list[Waiting[Any]]:
        """Take back all requests; with ``tasks`` the tasks too."""
        for loop in list(self._gatherings):
            self.release(loop)
        kept = [item for item in self._queue if isinstance(item, Task) and not tasks]
        withdrawn: list[Waiting[Any]] = []
        for item in self._queue:
            if isinstance(item, dict):
                withdrawn += itertools.chain.from_iterable(item.values())
            elif tasks:
                withdrawn.append(item.future)
        self._queue = deque(kept)
        return withdrawn

    def _fills(self, requests: Pending[R, A]) -> bool:
        return self._limit is not None and len(requests) >= self._limit

    def _admit(self, pending: Pending[R, A], running: Pending[R, A]) -> list[R]:
        """Move requests of one kind from ``pending`` into flight, as many as fit, and return
        those."""
        newcomers: list[R] = []
        taken = self._timeline.clock()
        kind = self._kind(next(iter(running))) if running else None
        for request, asked in list(pending.items()):
            if self._fills(running):
                break
            waiting = [future for future in asked if not future.done()]
            if not waiting:
                self._counters.cancelled += len(asked)
                del pending[request]
                continue
            own_kind = self._kind(request)
            if not running:
                kind = own_kind
            elif own_kind != kind:
                # The first of another kind waits for its turn; those behind it of this kind may
                # still join, unless the batch is already on its way: else a stream of one kind
                # could starve the other.
                if newcomers:
                    continue
                break
            if request in running:
                running[request] += waiting
                self._counters.dedup_hits += 1
            else:
                running[request] = waiting
                newcomers.append(request)
            self._counters.cancelled += len(asked) - len(waiting)
            del pending[request]
        if newcomers:
            self._timeline.add("queue", self._queued_since, requests=len(newcomers))
            self._queued_since = taken  # of those left behind, if any
        if not pending and self._queue and self._queue[0] is pending:
            self._queue.popleft()
        return newcomers
