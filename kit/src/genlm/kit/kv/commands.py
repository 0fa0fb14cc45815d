"""The commands that the planner gives to a table of keys and values."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from genlm.kit.segments import Segment, Slot, Trunk


@frozen
class Resize:
    """Change the size of the table.

    This reads and writes every slot. If it fails, slots may be incomplete, and the planner drops
    all of them.

    Attributes:
        slots: The new number of slots.
        columns: The new number of columns of each slot.
        kept: The slots that stay. Slot ``kept[i]`` becomes slot ``i``; its columns are kept up to
            the new size. All other values of the table must be finite, for example zero, because
            masked columns take part in matrix products.
    """

    slots: int
    columns: int
    kept: tuple[int, ...]


@frozen
class NewTrunk:
    """Allocate memory for all positions of a shared prefix, and store it as ``trunk.layers``."""

    trunk: Trunk


@frozen
class Copy:
    """Copy the first positions of a segment to the front of a new shared prefix, or those of a
    shared prefix to the front of slots.

    Attributes:
        source: The segment to read.
        targets: The segments to write.
        size: The most positions that a target needs.
    """

    source: Segment
    targets: tuple[Trunk] | tuple[Slot, ...]
    size: int


@frozen
class Fork:
    """Copy the first columns of slots to other slots, pair by pair.

    Attributes:
        sources: The slots to read; none of them is a target.
        targets: The slots to write.
        columns: The most columns that a target needs.
    """

    sources: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    columns: int


@frozen
class Shift:
    """Move the columns of slots, from column ``by`` on, to the front. If this fails, the slots are
    lost.

    Attributes:
        slots: The slots.
        by: The first column to move.
        columns: The most columns that a slot then needs.
    """

    slots: tuple[Slot, ...]
    by: int
    columns: int


@frozen
class Join:
    """Put the first ``size`` positions of the shared prefix ``below`` in front of those of
    ``trunk``. If this fails, ``trunk`` must be unchanged."""

    trunk: Trunk
    below: Trunk
    size: int


@frozen
class Blank:
    """Set a slot to zero, from column ``first`` on."""

    slot: Slot
    first: int


Command = Resize | NewTrunk | Copy | Fork | Shift | Join | Blank


class Table(Protocol):
    """An engine's store of slots of equal length and shared prefixes, which it implements."""

    def do(self, command: Command) -> None:
        """Carry out a command.

        Raises:
            Exception: the command was not carried out. The planner's caller gets the error.
        """

    def limit(self, used: int) -> int:
        """The most positions that slots and shared prefixes may take together.

        Args:
            used: How many positions the current batch and pinned contexts take. All slots have the
                same length, so beside longer slots this may be up to twice what they need.
        """
