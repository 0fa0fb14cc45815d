"""The queues in which requests wait, and the choice of the next call. This module knows neither Ray
nor the time.

A request waits at the replica that knows its prefix, and is sent with others in a portion of
limited size. A free replica takes over half of the requests that wait at another. The requests that
a replica was computing when it died are suspects. They are tried on a replica that has nothing else
to do. At first all are tried together, since most deaths have other causes. If the replica dies
again, they are tried in ever smaller groups, down to a single request.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

from genlm.core.types import Query, ReductionRequest, SampleRequest, ScoreRequest, query_of
from genlm.ray.affinity import Affinity
from genlm.ray.member import Job, Member, Waiting, alive

#: For each kind, how many requests a call has, and how many calls a replica has in flight: one
#: being computed and one that comes next. A call costs the program as much as a hundred functions
#: of rows, whose results are small. Samples end one by one, so each has a call of its own.
LIMITS: dict[type, tuple[int, int]] = {
    Query: (256, 2),
    ReductionRequest: (512, 2),
    ScoreRequest: (256, 2),
    SampleRequest: (1, 64),
}

#: How many replicas may die while they compute one request alone before the request fails.
MAX_DEATHS = 3

#: How many replicas try suspects at a time, and into how many groups suspects are divided.
MAX_TRIALS, SUSPECT_GROUPS = 2, 8

#: A replica, the jobs of one call to it, and whether they are suspects.
Portion = tuple[Member, list[Job], bool]


class Placing:
    """The waiting requests, by replica, and the suspects."""

    def __init__(self) -> None:
        self._ready: list[Member] = []
        self._homeless: list[Job] = []  # jobs that wait until a replica is ready
        self._suspects: deque[list[Job]] = deque()
        self._turns = itertools.count()
        self.affinity: Affinity[Member] = Affinity()
        self.busy: set[Member] = set()  # replicas on which another program is trying suspects

    def join(self, member: Member) -> None:
        """Note that a replica is ready."""
        self._ready.append(member)
        homeless, self._homeless = self._homeless, []
        self._place(homeless)

    def add(self, jobs: Iterable[Job]) -> None:
        self._place(self._in_turn(jobs))

    def _in_turn(self, jobs: Iterable[Job]) -> list[Job]:
        """Put jobs at the end of the queues."""
        jobs, turn = list(jobs), next(self._turns)
        for job in jobs:
            job.turn = turn
        return jobs

    def _place(self, jobs: Iterable[Job]) -> None:
        """Let jobs wait at the replicas that know their prefixes, if possible not where suspects
        are tried."""
        members = [member for member in self._ready if member.trial is None] or self._ready
        loads = {member: len(member.waiting) + member.in_flight() for member in members}
        jobs = list(jobs)
        if not loads:
            self._homeless += jobs
            return
        chosen = self.affinity.choose([query_of(job.request) for job in jobs], loads)
        for job, member in zip(jobs, chosen, strict=True):
            member.waiting.add(job)

    def remove_done(self) -> None:
        """Drop the jobs that no caller waits for."""
        for member in self._ready:
            member.waiting = Waiting(alive(member.waiting))
            member.trial = None if member.trial is None else Waiting(alive(member.trial))
        self._homeless = alive(self._homeless)
        self._suspects = deque(filter(None, map(alive, self._suspects)))

    def next(self, coming: bool) -> Portion | None:
        """The next call to make. ``coming`` says whether another replica will soon be ready."""
        self._assign_suspects(coming)
        return next(filter(None, map(self._portion, self._ready)), None) or self._relieve()

    def _portion(self, member: Member) -> Portion | None:
        """The next call to a replica."""
        flying = [type(call.jobs[0].request) for call in member.asked]
        if member.trial is not None and not member.trial and not flying:
            member.trial = None  # all suspects have been answered, so they are innocent
        if member.trial is not None and flying and not member.trying:
            return None
        waiting = member.waiting if member.trial is None else member.trial
        for kind, (size, calls) in LIMITS.items():
            queue = waiting.queues[kind]
            if queue and flying.count(kind) < calls:
                jobs = [queue.popleft() for _ in range(min(size, len(queue)))]
                return member, jobs, waiting is member.trial
        return None

    def _relieve(self) -> Portion | None:
        """Jobs that a free replica takes over from another: suspects, or half of the longest
        queue."""
        free = next((member for member in self._ready if member.free), None)
        if free is None:
            return None
        # A replica on which another program tries suspects is left out, because it would reject
        # these suspects again and again.
        alone = next((each for each in self._ready if each.free and each not in self.busy), None)
        for member in self._ready:
            if member.trial is not None and not member.trying and alone is not None:
                alone.trial, member.trial = member.trial, None
                return self._portion(alone)
        longest = max(self._ready, key=lambda member: len(member.waiting))
        longest.waiting.give_half(free.waiting)
        return self._portion(free)

    def _assign_suspects(self, coming: bool) -> None:
        """Give a group of suspects a replica to be tried on."""
        members = [member for member in self._ready if member.trial is None]
        trials = len(self._ready) - len(members)
        members = [member for member in members if member not in self.busy]
        if not (self._suspects and members) or trials >= MAX_TRIALS:
            return
        if len(members) == 1 and not self._may_try_on_last(members[0], coming):
            return
        member = min(members, key=lambda member: (member.in_flight(), len(member.waiting)))
        member.trial = Waiting(self._suspects.popleft())
        moved, member.waiting = member.waiting, Waiting()
        self._place(moved)

    def _may_try_on_last(self, member: Member, coming: bool) -> bool:
        """Whether the only replica may try suspects. It may if it has no other requests; or, in
        turn with these, if no other replica will soon be ready for them."""
        if len(self._ready) > 1:
            return False
        if not member.waiting and member.free:
            return True
        first = self._suspects[0][0].turn
        return not coming and all(first < job.turn for job in member.waiting)

    def postpone(self, member: Member, jobs: Iterable[Job]) -> None:
        """Try suspects later or elsewhere, because another program tries suspects on the
        replica."""
        self.busy.add(member)
        self._suspect(alive(jobs))

    def split(self, jobs: Sequence[Job]) -> None:
        """Try jobs again in smaller groups."""
        size = -(-len(jobs) // SUSPECT_GROUPS) or 1
        for start in range(0, len(jobs), size):
            self._suspect(jobs[start : start + size])

    def _suspect(self, jobs: Sequence[Job]) -> None:
        if jobs:
            self._suspects.append(self._in_turn(jobs))

    def leave(self, member: Member, computing: bool) -> list[Job]:
        """Ask again for the jobs of a lost replica, except for the jobs to blame, which are
        returned. ``computing`` says that one of its jobs may have killed it."""
        if member not in self._ready:
            return []
        self._ready.remove(member)
        self.affinity.forget_member(member)
        lost = alive(job for call in member.asked for job in call.jobs)
        if computing and member.trying:
            if len(lost) == 1:
                lost[0].deaths += 1
            self.split([job for job in lost if job.deaths < MAX_DEATHS])
        elif computing or member.trying:
            self._suspect(lost)
        else:
            self.add(lost)
        self._suspect(list(member.trial or ()))
        moved, member.waiting, member.trial = member.waiting, Waiting(), None
        self._place(moved)
        return [job for job in lost if job.deaths >= MAX_DEATHS]
