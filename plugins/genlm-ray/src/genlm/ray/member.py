"""The state of the fleet: its requests, its replicas, and the calls to each replica."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from enum import Enum
from typing import Any

from attrs import define, field

from genlm.core.types import Query, ReductionRequest, Request, SampleRequest, ScoreRequest
from genlm.ray.log import Action, Entry


@define(eq=False)
class Job:
    """A request, and how often replicas have died of it."""

    request: Request
    turn: int = 0  # the place in line, shared by those that came together
    deaths: int = 0  # replicas that died while this alone was tried there
    done: bool = False  # answered, or nobody waits for it any more


def alive(jobs: Iterable[Job]) -> list[Job]:
    return [job for job in jobs if not job.done]


class Waiting:
    """Waiting jobs by kind. The kinds take turns."""

    def __init__(self, jobs: Iterable[Job] = ()) -> None:
        self.queues: dict[type, deque[Job]] = {
            kind: deque() for kind in (Query, ReductionRequest, ScoreRequest, SampleRequest)
        }
        for job in jobs:
            self.add(job)

    def __len__(self) -> int:
        return sum(map(len, self.queues.values()))

    def __iter__(self) -> Iterator[Job]:
        return itertools.chain.from_iterable(self.queues.values())

    def add(self, job: Job) -> None:
        self.queues[type(job.request)].append(job)

    def give_half(self, other: Waiting) -> None:
        """Move the later half of each queue to ``other``."""
        for kind, queue in self.queues.items():
            for _ in range((len(queue) + 1) // 2):
                other.queues[kind].appendleft(queue.pop())


class State(Enum):
    STARTING = "loads the model"
    LOADED = "is given what the log says"
    READY = "answers"
    RESTING = "could not be started, and will be tried again"


@define(eq=False)
class Call:
    """A call to a replica that has not returned."""

    member: Member
    action: Action
    jobs: list[Job] = field(factory=list)
    on_trial: bool = False  # the jobs are suspects
    entry: Entry | None = None
    reference: Any = None  # Ray's
    journey: Journey | None = None  # goes on with what comes back


#: Consecutive calls, each of which is made when the one before it has returned.
Journey = Generator[Call, Any, None]


@define(eq=False)
class Member:
    """One replica, as the program knows it."""

    index: int
    line: Any  # on which it is called
    state: State = State.STARTING
    since: float = 0.0  # when it came into that state
    heard_at: float = 0.0
    life: int = 0
    failures: int = 0  # starts that failed, one after the other
    refusals: int = 0  # among these, loads that raised an error
    calls: set[Call] = field(factory=set)
    have: dict[Entry, None] = field(factory=dict)
    functions: set[str] = field(factory=set)  # the keys of those that it was sent
    died_of: Entry | None = None
    waiting: Waiting = field(factory=Waiting)  # for this replica
    trial: Waiting | None = None  # suspects that it tries, as soon as nothing else is in flight

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def loaded(self) -> bool:
        return self.state in (State.READY, State.LOADED)

    @property
    def asked(self) -> list[Call]:
        """The calls for requests that are in flight."""
        return [call for call in self.calls if call.jobs]

    @property
    def free(self) -> bool:
        return self.trial is None and not self.asked

    @property
    def trying(self) -> bool:
        return any(call.on_trial for call in self.asked)

    def in_flight(self) -> int:
        return sum(len(call.jobs) for call in self.calls)
