"""The log: what every replica must have beyond the model, in order. Pure.

An entry is tried on one replica. It enters the log when it has worked there, and goes to all. If
another replica refuses it, or dies of it, it is taken back everywhere. A replica that starts again
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


@define(eq=False)
class Change:
    """A change of the log under way. There is at most one: its caller waits.

    Attributes:
        entry: What is added; ``None`` where something is removed.
        done: Called with the error, or with ``None``.
        tried: Whether it is decided: it is in the log, or it has failed.
        member: Where it is tried.
        error: Why it failed.
    """

    entry: Entry | None
    done: Callable[[Exception | None], None]
    tried: bool = False
    member: Any = None
    error: Exception | None = None


@define(eq=False)
class Log:
    """The entries, and the change under way."""

    entries: dict[Entry, None] = field(factory=dict)
    change: Change | None = None

    def next_for(self, member: Any, have: dict[Entry, None]) -> tuple[Entry, Action] | None:
        """What a replica must do next to have what it must have; ``None`` if it has it."""
        for entry in have:
            if entry not in self.entries and entry.take_back:
                return entry, entry.take_back
        for entry in self.entries:
            if entry not in have:
                return entry, entry.apply
        change = self.change
        if change and change.entry and not change.tried and change.member is member:
            return change.entry, change.entry.apply
        return None

    def worked(self, entry: Entry) -> None:
        """A replica has applied an entry."""
        entry.deaths = 0
        if self.change and self.change.entry is entry and not self.change.tried:
            self.change.tried = True
            self.entries[entry] = None

    def failed(self, entry: Entry, error: Exception) -> bool:
        """An entry leaves the log, or never enters it. Whether its caller still waits for it."""
        self.entries.pop(entry, None)
        if self.change and self.change.entry is entry:
            self.change.tried, self.change.error = True, self.change.error or error
            return True
        return False

    def remove(self, which: Callable[[Entry], bool]) -> list[Entry]:
        """Remove entries; returns them."""
        removed = [entry for entry in self.entries if which(entry)]
        for entry in removed:
            del self.entries[entry]
        return removed
