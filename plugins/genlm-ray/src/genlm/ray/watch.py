"""The watch alone decides whether a replica is dead. It does no input or output, and is given the
time.

One call to each replica is always under way, even if the replica has no work, so Ray reports the
death of its process or node at once. This call returns every ``PULSE_SECONDS``. It has a
concurrency group of its own, so that no amount of work delays it. If it does not return, the
replica hangs, which Ray does not notice.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import define, field

from genlm.ray.member import Member, State

#: The seconds that a call of the watch takes, and the number of calls without an answer after which
#: a replica counts as dead.
PULSE_SECONDS, MAX_MISSED_PULSES = 10.0, 6

#: After this many pulses without a message from a program, a replica drops the program's adapters
#: and pinned prompts.
LEASE_PULSES = 4

#: How often in a row loading may raise an error before the replica counts as lost. Deaths while
#: loading are not counted, since another program's request may cause them; they are limited by the
#: time for which all replicas may be away.
MAX_REFUSED_STARTS = 3

#: The most seconds between two attempts to start a replica, and the seconds within which a starting
#: replica is expected to be ready.
MAX_RETRY_SECONDS, STARTING_SECONDS = 60.0, 60.0


@define
class Watch:
    """Looks at all replicas from time to time."""

    members: Sequence[Member]
    patience: float  # seconds for which all replicas may be lost
    _seen: float
    now: float = 0.0  # the program's own time, which does not pass while the process is stopped
    alive_at: float = 0.0  # when a replica was last ready
    pulse: float = field(factory=lambda: PULSE_SECONDS)  # seconds that a call of the watch takes

    def look(self, now: float) -> list[Member]:
        """The replicas whose time is over: silent ones, ones that have been loading for too long,
        and ones that have rested long enough."""
        self.now += min(now - self._seen, self.pulse / 2)
        self._seen = now
        if any(member.ready for member in self.members):
            self.alive_at = self.now
        return [member for member in self.members if self.now >= self._due(member)]

    def _due(self, member: Member) -> float:
        # The power is an int, which grows without bound.
        rest: float = min(2 ** (member.failures - 1), MAX_RETRY_SECONDS)
        limits = {State.STARTING: self.patience, State.RESTING: rest}
        return member.heard_at + limits.get(member.state, MAX_MISSED_PULSES * self.pulse)

    def enter(self, member: Member, state: State) -> None:
        member.state = state
        member.since = member.heard_at = self.now

    def awaited(self, member: Member, seconds: float) -> bool:
        """Whether a replica is starting, and has been for less than ``seconds``."""
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
