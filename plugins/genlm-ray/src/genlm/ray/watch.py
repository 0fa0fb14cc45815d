"""The one judge of death. Pure: the time is given.

Ray says when a replica's process or node has died: one call to it is always under way, so that this
is known at once, whether it has work or not. That call comes back every ``PULSE`` seconds, by a
concurrency group of its own, past any amount of work. A replica where it does not hangs, which Ray
does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

from attrs import define, field

from genlm.ray.log import Entry
from genlm.ray.placing import Portion

#: Seconds that a call of the watch takes, and after how many times that without an answer a replica
#: counts as dead.
PULSE, SILENT = 10.0, 6

#: After how many times that a replica drops what a program has there that it has not heard of.
LEASE = 4

#: How often a replica may refuse to load, one time after the other, before it counts as lost. One
#: that dies may do so by a neighbour's fault: it has as long as all replicas may be away.
STARTS = 3

#: The most seconds between two tries to start a replica.
REST = 60.0

#: Seconds for which a replica that is starting is expected to be there soon.
HOPE = 60.0


class Gone(Exception):
    """A replica is lost.

    Attributes:
        computing: Whether it may have died of what it was computing.
        ended: Whether somebody ended the fleet on purpose.
    """

    def __init__(self, why: str, computing: bool = True, ended: bool = False) -> None:
        super().__init__(why)
        self.computing, self.ended = computing, ended


class State(Enum):
    STARTING = "loads the model"
    LOADED = "is given what the log says"
    READY = "answers"
    RESTING = "could not be started, and will be tried again"
    ENDED = "was ended on purpose"


@define(eq=False)
class Call:
    """What was asked of a replica, and has not come back."""

    member: Member
    then: Any  # takes what came back
    portion: Portion[Member] | None = None
    entry: Entry | None = None
    applies: bool = False  # the entry, and may be what the replica dies of
    reference: Any = None


@define(eq=False)
class Member:
    """One replica, as the program knows it."""

    index: int
    line: Any  # on which it is called
    state: State = State.STARTING
    since: float = 0.0  # when it came into that state
    life: int = 0
    failures: int = 0  # starts that failed, one after the other
    refusals: int = 0  # among these, loads that raised an error
    heard_at: float = 0.0
    calls: set[Call] = field(factory=set)
    have: dict[Entry, None] = field(factory=dict)
    died_of: Entry | None = None

    @property
    def ready(self) -> bool:
        return self.state is State.READY

    @property
    def loaded(self) -> bool:
        return self.state in (State.READY, State.LOADED)

    def rest(self) -> float:
        """Seconds to the next try to start it."""
        return min(2.0 ** (self.failures - 1), REST) if self.failures else 0.0


@define
class Watch:
    """Looks at all replicas from time to time.

    Attributes:
        now: The time, as the program lived it: while it was stopped, none passed.
        alive_at: When a replica was last ready.
        pulse: Seconds that a call of the watch takes.
    """

    members: Sequence[Member]
    _seen: float
    now: float = 0.0
    alive_at: float = 0.0
    pulse: float = field(factory=lambda: PULSE)

    def look(self, now: float, patience: float) -> list[Member]:
        """The replicas that have not been heard of, or have been loading, for too long."""
        self.now += min(now - self._seen, self.pulse / 2)
        self._seen = now
        if any(member.ready for member in self.members):
            self.alive_at = self.now
        limit = self.now - SILENT * self.pulse
        loading = [m for m in self.members if m.state is State.STARTING]
        late = [member for member in loading if self.now >= member.since + patience]
        return late + [m for m in self.members if m.loaded and m.heard_at < limit]

    def enter(self, member: Member, state: State) -> None:
        member.state, member.since = state, self.now

    def rested(self) -> list[Member]:
        """The replicas that are to be started now."""
        due = (m for m in self.members if m.state is State.RESTING)
        return [member for member in due if self.now >= member.since + member.rest()]

    def awaited(self, member: Member, seconds: float) -> bool:
        """Whether a replica is about to be ready, and has been for no longer than that."""
        starts = member.state in (State.STARTING, State.LOADED)
        return starts and self.now < member.since + seconds

    def hopeless(self, patience: float) -> str | None:
        """Why no replica will answer any more."""
        ended = [member for member in self.members if member.state is State.ENDED]
        if len(ended) == len(self.members):
            return "the fleet has been ended"
        if all(m in ended or m.refusals >= STARTS for m in self.members):
            return f"all {len(self.members)} replicas are lost, and none could be started again"
        if self.now >= self.alive_at + patience:
            return (
                f"none of the {len(self.members)} replicas has been ready for "
                f"start_timeout={patience:g} seconds; look at `ray status`"
            )
        return None
