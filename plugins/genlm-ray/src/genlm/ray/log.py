"""The log: what every replica must have beyond the model, in order. Pure.

An entry is tried on one replica. It enters the log when it has worked there, and goes to all. If
another replica rejects it, or dies of it, it is taken back everywhere. A replica that starts again
gets the log, entry by entry; one that fails then is lost, and not the replica.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

#: A replica's method and its arguments.
Action = tuple[Any, ...]


@define(eq=False)
class Entry:
    """An adapter, a pinned prompt, or an order to drop all key/value state."""

    apply: Action
    take_back: Action | None = None  # None: it leaves the log once it has been everywhere
    version: int | None = None  # of the adapter that it is or needs
    deaths: int = 0  # replicas that died of it, one after the other

    @property
    def pinned(self) -> bool:
        """Whether a clearing drops it."""
        return bool(self.apply[0] == "pin")

    def applied_by(self, action: Action) -> bool:
        """Whether the action adds something, of which a replica may die."""
        return action is self.apply and self.take_back is not None


@define(eq=False)
class Change:
    """A change of the log under way. There is at most one: its caller waits."""

    entry: Entry | None  # what is added; None where something is removed
    done: Callable[[Exception | None], None]
    member: Any = None  # where it is tried
    error: Exception | None = None  # why it failed


@define(eq=False)
class Log:
    """The entries, and the change under way."""

    entries: dict[Entry, None] = field(factory=dict)
    change: Change | None = None

    def on_trial(self) -> Entry | None:
        """What is being added, and has not worked on any replica so far."""
        change = self.change
        tried = change is None or change.error or change.entry in self.entries
        return None if change is None or tried else change.entry

    def next_for(self, member: Any, have: dict[Entry, None]) -> tuple[Entry, Action] | None:
        """What a replica must do next to have what it must have; ``None`` if it has it."""
        for entry in have:
            if entry not in self.entries and entry.take_back:
                return entry, entry.take_back
        trial = self.on_trial()
        mine = [trial] if trial and self.change and self.change.member is member else []
        for entry in (*self.entries, *mine):
            if entry not in have:
                return entry, entry.apply
        return None

    def worked(self, entry: Entry) -> None:
        """A replica has applied an entry."""
        entry.deaths = 0
        if entry is self.on_trial():
            self.entries[entry] = None

    def failed(self, entry: Entry, error: Exception) -> bool:
        """An entry leaves the log, or never enters it. Whether its caller still waits for it."""
        self.entries.pop(entry, None)
        if self.change is None or self.change.entry is not entry:
            return False
        self.change.error = self.change.error or error
        return True

    def remove(self, which: Callable[[Entry], bool]) -> list[Entry]:
        """Remove entries; returns them."""
        removed = [entry for entry in self.entries if which(entry)]
        for entry in removed:
            del self.entries[entry]
        return removed
