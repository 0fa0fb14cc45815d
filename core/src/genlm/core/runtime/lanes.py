"""The queue of the engine thread: tasks, and the requests of calls, in lanes."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

from attrs import define

from genlm.core.runtime.calls import Call, Callers, Task
from genlm.core.runtime.timeline import Timeline

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
