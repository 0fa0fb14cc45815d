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
    turn: int = 0  # place in the queue, shared by requests that came together
    deaths: int = 0  # how many replicas died while they computed this request alone
    done: bool = False  # answered, or no longer wanted


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
    on_trial: bool = False  # the jobs are suspected of having killed a replica
    entry: Entry | None = None
    reference: Any = None  # Ray's reference to the result
    journey: Journey | None = None  # continues with the result


#: Consecutive calls. Each is made when the previous one has returned.
Journey = Generator[Call, Any, None]


@define(eq=False)
class Member:
    """One replica, as the program knows it."""

    index: int
    line: Any  # the line on which the replica is called
    state: State = State.STARTING
    since: float = 0.0  # when the replica entered this state
    heard_at: float = 0.0
    life: int = 0
    failures: int = 0  # consecutive failed starts
    refusals: int = 0  # those of these starts in which loading raised an error
    calls: set[Call] = field(factory=set)
    have: dict[Entry, None] = field(factory=dict)
    functions: set[str] = field(factory=set)  # the keys of the functions that it was sent
    died_of: Entry | None = None
    waiting: Waiting = field(factory=Waiting)  # the jobs that wait for this replica
    trial: Waiting | None = None  # suspects that it tries once nothing else is in flight

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
