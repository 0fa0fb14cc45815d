"""The log: what every replica must have beyond the model, in order. It does no input or output.

A new entry is tried on one replica. If it works there, it enters the log, and all replicas apply
it. If another replica rejects it, or dies of it, it is taken back everywhere. A replica that starts
again applies the log entry by entry. If an entry fails then, the entry is given up, and the replica
is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import define, field

#: A method of the replica, and its arguments.
Action = tuple[Any, ...]


@define(eq=False)
class Entry:
    """An adapter, a pinned prompt, or an order to drop all key/value state."""

    apply: Action
    # None: the entry leaves the log once every replica has applied it.
    take_back: Action | None = None
    version: int | None = None  # the version of the adapter that it adds or needs
    deaths: int = 0  # consecutive deaths of replicas that applied it

    @property
    def pinned(self) -> bool:
        """Whether the entry is a pinned prompt, which clearing drops."""
        return bool(self.apply[0] == "pin")

    def applied_by(self, action: Action) -> bool:
        """Whether the action adds the entry to a replica, which may die of it."""
        return action is self.apply and self.take_back is not None


@define(eq=False)
class Change:
    """The current change of the log. There is at most one, because its caller waits for it."""

    entry: Entry | None  # the entry to add; None if one is removed
    done: Callable[[Exception | None], None]
    member: Any = None  # the replica on which the entry is tried
    error: Exception | None = None  # why the change failed


@define(eq=False)
class Log:
    """The entries, and the current change."""

    entries: dict[Entry, None] = field(factory=dict)
    change: Change | None = None

    def on_trial(self) -> Entry | None:
        """The entry that is being added, if it has not worked on any replica yet."""
        change = self.change
        tried = change is None or change.error or change.entry in self.entries
        return None if change is None or tried else change.entry

    def next_for(self, member: Any, have: dict[Entry, None]) -> tuple[Entry, Action] | None:
        """The next entry and action by which a replica follows the log; ``None`` if nothing is left
        to do."""
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
        """Remove a failed entry, or keep it from entering the log. Returns whether its caller still
        waits for it."""
        self.entries.pop(entry, None)
        if self.change is None or self.change.entry is not entry:
            return False
        self.change.error = self.change.error or error
        return True

    def remove(self, which: Callable[[Entry], bool]) -> list[Entry]:
        """Remove entries, and return them."""
        removed = [entry for entry in self.entries if which(entry)]
        for entry in removed:
            del self.entries[entry]
        return removed
