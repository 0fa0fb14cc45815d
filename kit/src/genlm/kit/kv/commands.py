"""The commands: what a table of key/value state is asked to move."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from genlm.kit.segments import Segment, Slot, Trunk


@frozen
class Resize:
    """Change the size of the table.

    Reads and writes every slot. If this fails, slots may be incomplete: then all are lost.

    Attributes:
        slots: The new number of slots.
        columns: The new number of columns of each slot.
        kept: The slots that stay. Number ``kept[i]`` becomes number ``i``; its columns are kept up
            to the new size. All other numbers must be finite, for example zero, because masked
            columns take part in products.
    """

    slots: int
    columns: int
    kept: tuple[int, ...]


@frozen
class NewTrunk:
    """Allocate memory for all positions of a trunk, and store it as ``trunk.layers``."""

    trunk: Trunk


@frozen
class Copy:
    """Copy the first positions of a segment to the front of one trunk, or those of a trunk to the
    front of slots.

    Attributes:
        source: What is read.
        targets: What is written.
        size: The most positions that one of them needs.
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
        columns: The most columns that one of them needs.
    """

    sources: tuple[Slot, ...]
    targets: tuple[Slot, ...]
    columns: int


@frozen
class Shift:
    """Move the columns of slots from ``by`` on to their front. If this fails, the slots are lost.

    Attributes:
        slots: The slots.
        by: The first column to move.
        columns: The most columns that one of them then needs.
    """

    slots: tuple[Slot, ...]
    by: int
    columns: int


@frozen
class Join:
    """Put the first ``size`` positions of the trunk below in front of those of ``trunk``. If this
    fails, ``trunk`` must be unchanged."""

    trunk: Trunk
    below: Trunk
    size: int


@frozen
class Blank:
    """Make a slot zero from a column on."""

    slot: Slot
    first: int


Command = Resize | NewTrunk | Copy | Fork | Shift | Join | Blank


class Table(Protocol):
    """The engine's part: slots of equal length, and trunks."""

    def do(self, command: Command) -> None:
        """Carry out a command.

        Raises:
            Exception: it was not carried out; the planner's caller gets the error.
        """

    def limit(self, used: int) -> int:
        """The most positions that slots and trunks may take together.

        Args:
            used: What the current batch and pinned contexts take. If there are longer slots, this
                may be up to twice what they need, because all slots have the same length.
        """
