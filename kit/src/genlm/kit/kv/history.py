"""The history: the last commands to tables of key/value state, in words, for finding a wrong
copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from genlm.kit.kv.commands import Blank, Command, Copy, Fork, Join, NewTrunk, Resize, Shift, Table
from genlm.kit.segments import Segment, Slot

#: The last commands; ``None`` if they are not kept.
_last: deque[str] | None = None


def keep(count: int = 12) -> deque[str]:
    """Keep the last commands of the tables of all planners that are made from now on.

    Returns:
        The commands in words, the last one at the end. A failed command says so.
    """
    global _last
    _last = deque(maxlen=count) if _last is None else _last
    return _last


def noted(table: Table) -> Table:
    """The table, wrapped so that its commands are noted if the history is kept."""
    return table if _last is None else _Noted(table, _last)


class _Noted:
    def __init__(self, table: Table, last: deque[str]) -> None:
        self._table, self._last = table, last
        self.limit = table.limit

    def do(self, command: Command) -> None:
        # Put into words first, because a command may change the objects that it names.
        words = in_words(command)
        try:
            self._table.do(command)
        except BaseException:
            words += ", which failed"
            raise
        finally:
            self._last.append(words)


def in_words(command: Command) -> str:
    """A command as a line of a message.

    Examples:
        >>> from genlm.core.context import Context
        >>> slot, other = (Slot(Context((7, 8, 9)), index=index) for index in (0, 3))
        >>> in_words(Fork((slot,), (other,), columns=2))
        'Fork: 2 columns of slots 0 to slots 3'
    """
    match command:
        case Resize(slots, columns, kept):
            told = f"to {slots} slots of {columns} columns, of which {len(kept)} stay"
        case NewTrunk(trunk):
            told = _name(trunk)
        case Copy(source, targets, size):
            told = f"{size} positions of {_name(source)} to {', '.join(map(_name, targets))}"
        case Fork(sources, targets, columns):
            told = f"{columns} columns of slots {_indices(sources)} to slots {_indices(targets)}"
        case Shift(slots, by, _):
            told = f"slots {_indices(slots)} by {by} columns"
        case Join(trunk, below, size):
            told = f"{size} positions of {_name(below)} in front of {_name(trunk)}"
        case Blank(slot, first):
            told = f"{_name(slot)} from column {first}"
    return f"{type(command).__name__}: {told}"


def _name(segment: Segment) -> str:
    if isinstance(segment, Slot):
        return f"slot {segment.index}"
    return f"the shared prefix of positions {segment.start} to {segment.stop}"


def _indices(slots: Iterable[Slot]) -> str:
    return ", ".join(str(slot.index) for slot in slots)
