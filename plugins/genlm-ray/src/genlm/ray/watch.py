"""The one judge of death. Pure: the time is given.

Ray says when a replica's process or node has died: one call to it is always under way, so that this
is known at once, whether it has work or not. That call comes back every ``PULSE`` seconds, by a
concurrency group of its own, past any amount of work. A replica where it does not hangs, which Ray
does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from genlm.ray.member import Member, State

#: Seconds that a call of the watch takes, and after how many times that without an answer a replica
#: counts as dead.
PULSE, SILENT = 10.0, 6

#: After how many pulses without a message a replica drops the adapters and the pinned prompts of a
#: program.
LEASE_PULSES = 4

#: How often a replica may refuse to load, one time after the other, before it counts as lost. One
#: that dies may do so by a neighbour's fault: it has as long as all replicas may be away.
MAX_REFUSED_STARTS = 3

#: Seconds between two tries to start a replica, at most; and for which one that is starting is
#: expected to be there soon.
REST, HOPE = 60.0, 60.0


@define
class Watch:
    """Looks at all replicas from time to time."""

    members: Sequence[Member]
    patience: float  # seconds for which all replicas may be lost
    _seen: float
    now: float = 0.0  # as the program lived it: while it was stopped, no time passed
    alive_at: float = 0.0  # when a replica was last ready
    pulse: float = field(factory=lambda: PULSE)  # seconds that a call of the watch takes

    def look(self, now: float) -> list[Member]:
        """The replicas whose time is over: they have not been heard of, have been loading for too
        long, or have rested."""
        self.now += min(now - self._seen, self.pulse / 2)
        self._seen = now
        if any(member.ready for member in self.members):
            self.alive_at = self.now
        return [member for member in self.members if self.now >= self._due(member)]

    def _due(self, member: Member) -> float:
        rest: float = min(2 ** (member.failures - 1), REST)  # an int has no largest
        limits = {State.STARTING: self.patience, State.RESTING: rest}
        return member.heard_at + limits.get(member.state, SILENT * self.pulse)

    def enter(self, member: Member, state: State) -> None:
        member.state = state
        member.since = member.heard_at = self.now

    def awaited(self, member: Member, seconds: float) -> bool:
        """Whether a replica is about to be ready, and has been for no longer than that."""
        starts = member.state in (State.STARTING, State.LOADED)
        return starts and self.now < member.since + seconds

    def hopeless(self) -> str | None:
        """Why no replica will answer any more."""
        if all(member.refusals >= MAX_REFUSED_STARTS for member in self.members):
            return f"all {len(self.members)} replicas are lost, and none could be started again"
        if self.now >= self.alive_at + self.patience:
            return (
                f"none of the {len(self.members)} replicas has been ready for "
                f"start_timeout={self.patience:g} seconds; look at `ray status`"
            )
        return None
