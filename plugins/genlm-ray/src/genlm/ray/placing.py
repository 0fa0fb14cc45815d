"""Where requests wait, and which call is made next. Pure: it knows neither Ray nor the time.

A request waits at the replica that knows its prefix, and leaves in a bounded portion. A replica
that is free takes over half of what waits at another. What a replica was computing when it died is
suspect. Suspects are tried on a replica that has nothing else to do: all of them first, for most
deaths are nobody's fault, and if it dies again in ever smaller groups, down to one that is alone.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

from attrs import define, field

from genlm.core.types import Query, Request, SampleRequest, ScoreRequest, query_of
from genlm.ray.affinity import Affinity

M = TypeVar("M")

#: For each kind, how many requests go in a call, and how many calls a replica has in flight: one
#: at work, one that comes next. Draws end one by one, so each is a call of its own.
LIMITS: dict[type, tuple[int, int]] = {
    Query: (128, 2),
    ScoreRequest: (128, 2),
    SampleRequest: (1, 64),
}

#: How often replicas may die of one request alone, before it gets the error.
DEATHS = 3

#: How many replicas try suspects at a time, and into how many groups suspects are split.
TRIALS, GROUPS = 2, 8


@define(eq=False)
class Job:
    """A request, and what happened to it so far."""

    request: Request
    deaths: int = 0  # replicas that died while this alone was tried there
    done: bool = False  # answered, or nobody waits for it any more


def alive(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if not job.done]


class Waiting:
    """Jobs that wait, by kind, each with the number of its turn."""

    def __init__(self) -> None:
        self.queues: dict[type, deque[tuple[int, Job]]] = {kind: deque() for kind in LIMITS}

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def oldest(self) -> int | None:
        return min((queue[0][0] for queue in self.queues.values() if queue), default=None)

    def add(self, turn: int, job: Job) -> None:
        self.queues[type(job.request)].append((turn, job))

    def remove_done(self) -> None:
        for kind, queue in self.queues.items():
            self.queues[kind] = deque(item for item in queue if not item[1].done)

    def take_all(self) -> list[tuple[int, Job]]:
        taken = [item for queue in self.queues.values() for item in queue]
        for queue in self.queues.values():
            queue.clear()
        return taken

    def give_half(self, other: Waiting) -> None:
        """What came last, with its turn."""
        for kind, queue in self.queues.items():
            for _ in range((len(queue) + 1) // 2):
                other.queues[kind].appendleft(queue.pop())


@define(eq=False)
class Portion(Generic[M]):
    """The jobs of one call."""

    member: M
    jobs: list[Job]
    on_trial: bool


@define(eq=False)
class Place(Generic[M]):
    """A replica that is ready: what waits there, and what it was asked."""

    member: M
    waiting: Waiting = field(factory=Waiting)
    flying: list[Portion[M]] = field(factory=list)
    trial: Waiting | None = None  # suspects that it tries, as soon as nothing else is in flight

    def in_flight(self) -> int:
        return sum(len(portion.jobs) for portion in self.flying)

    def load(self) -> int:
        """How many requests it has."""
        return len(self.waiting) + self.in_flight()

    def free(self) -> bool:
        return self.trial is None and not self.flying

    def trying(self) -> bool:
        return any(portion.on_trial for portion in self.flying)

    def take(self) -> Portion[M] | None:
        """The next portion to send."""
        if self.trial is None:
            return self._portion(self.waiting, False)
        if not self.flying or self.trying():
            portion = self._portion(self.trial, True)
            if portion or self.flying:
                return portion
            self.trial = None  # all have been answered: they are innocent
            return self._portion(self.waiting, False)
        return None

    def _portion(self, waiting: Waiting, on_trial: bool) -> Portion[M] | None:
        for kind, (size, calls) in LIMITS.items():
            queue = waiting.queues[kind]
            if queue and sum(type(p.jobs[0].request) is kind for p in self.flying) < calls:
                jobs = [queue.popleft()[1] for _ in range(min(size, len(queue)))]
                self.flying.append(Portion(self.member, jobs, on_trial))
                return self.flying[-1]
        return None


class Placing(Generic[M]):
    """All that waits or is in flight."""

    def __init__(self) -> None:
        self._places: dict[M, Place[M]] = {}
        self._homeless: list[tuple[int, Job]] = []  # while no replica is ready
        self._suspects: deque[tuple[int, list[Job]]] = deque()
        self._turns = itertools.count()
        self.affinity: Affinity[Place[M]] = Affinity()
        self.busy: set[M] = set()  # where another program tries something, for some time

    def join(self, member: M) -> None:
        """A replica is ready."""
        self._places[member] = Place(member)
        homeless, self._homeless = self._homeless, []
        self._place(homeless)

    def add(self, jobs: Iterable[Job]) -> None:
        self._place([(next(self._turns), job) for job in jobs])

    def _place(self, items: Iterable[tuple[int, Job]]) -> None:
        """Put jobs where their prefixes are; not where suspects are tried, if that can be."""
        places = self._places.values()
        loads = {place: place.load() for place in places if place.trial is None}
        loads = loads or {place: place.load() for place in places}
        for turn, job in items:
            if not loads:
                self._homeless.append((turn, job))
                continue
            place = self.affinity.choose(query_of(job.request), loads)
            place.waiting.add(turn, job)
            loads[place] += 1

    def remove_done(self) -> None:
        """Forget the jobs that nobody waits for."""
        for place in self._places.values():
            place.waiting.remove_done()
            if place.trial is not None:
                place.trial.remove_done()
        self._homeless = [item for item in self._homeless if not item[1].done]
        groups = ((turn, alive(group)) for turn, group in self._suspects)
        self._suspects = deque((turn, group) for turn, group in groups if group)

    def next(self, coming: bool) -> Portion[M] | None:
        """The next call to make.

        Args:
            coming: Whether another replica will soon be ready.
        """
        self._assign_suspects(coming)
        for place in self._places.values():
            if portion := place.take():
                return portion
        return self._relieve()

    def _assign_suspects(self, coming: bool) -> None:
        """Give a group of suspects a replica to be tried on."""
        places = [place for place in self._places.values() if place.trial is None]
        trials = len(self._places) - len(places)
        places = [place for place in places if place.member not in self.busy]
        if not (self._suspects and places) or trials >= TRIALS:
            return
        if len(places) == 1 and not self._may_try_on_last(places[0], coming):
            return
        place = min(places, key=lambda place: (place.in_flight(), len(place.waiting)))
        turn, group = self._suspects.popleft()
        place.trial = Waiting()
        for job in group:
            place.trial.add(turn, job)
        self._place(place.waiting.take_all())

    def _may_try_on_last(self, place: Place[M], coming: bool) -> bool:
        """Not at the cost of others: while it has nothing else to do; or in turn, where no other
        replica will come to do the rest."""
        if len(self._places) > 1:
            return False
        oldest = place.waiting.oldest()
        if oldest is None and place.free():
            return True
        return not coming and (oldest is None or self._suspects[0][0] < oldest)

    def _relieve(self) -> Portion[M] | None:
        """A free replica takes over what waits at another: suspects, or half of the longest
        queue."""
        free = next((place for place in self._places.values() if place.free()), None)
        if free is None:
            return None
        for place in self._places.values():
            if place.trial is not None and not place.trying():
                free.trial, place.trial = place.trial, None
                return free.take()
        longest = max(self._places.values(), key=lambda place: len(place.waiting))
        longest.waiting.give_half(free.waiting)
        return free.take()

    def end(self, portion: Portion[M]) -> None:
        """A call has come back."""
        self._places[portion.member].flying.remove(portion)

    def postpone(self, portion: Portion[M]) -> None:
        """Another program tries suspects there: try these later, or elsewhere."""
        self.end(portion)
        self.busy.add(portion.member)
        self._suspect(alive(portion.jobs))

    def split(self, jobs: Sequence[Job]) -> None:
        """Try jobs again in smaller groups."""
        size = -(-len(jobs) // GROUPS)
        for start in range(0, len(jobs), size or 1):
            self._suspect(jobs[start : start + size])

    def _suspect(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._suspects.append((next(self._turns), list(jobs)))

    def leave(self, member: M, computing: bool) -> list[Job]:
        """A replica is lost; what it had is asked again, but for the jobs that are to blame, which
        are returned.

        Args:
            member: The replica.
            computing: Whether it may have died of what it was computing.
        """
        place = self._places.pop(member, None)
        if place is None:
            return []
        self.affinity.forget_member(place)
        lost = alive(job for portion in place.flying for job in portion.jobs)
        if computing and place.trying():
            if len(lost) == 1:
                lost[0].deaths += 1
            self.split([job for job in lost if job.deaths < DEATHS])
        elif computing or place.trying():
            self._suspect(lost)
        else:
            self.add(lost)
        if place.trial is not None:
            self._suspect([job for _, job in place.trial.take_all()])
        self._place(place.waiting.take_all())
        return [job for job in lost if job.deaths >= DEATHS]
