"""The commands: what a table of key/value state is asked to move."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from genlm.kit.segments import Row, Segment, Trunk


@frozen
class Resize:
    """Change the size of the table.

    Reads and writes every row. If this fails, rows may be incomplete: then all are lost.

    Attributes:
        rows, columns: The new size.
        kept: The rows that stay. Slot ``kept[i]`` becomes slot ``i``; its columns are kept up to
            the new size. Everything else must be finite, for example zero: masked columns take part
            in products.
    """

    rows: int
    columns: int
    kept: tuple[int, ...]


@frozen
class NewTrunk:
    """Allocate memory for all positions of a trunk, and store it as ``trunk.layers``."""

    trunk: Trunk


@frozen
class Copy:
    """Copy the first positions of a segment to the front of one trunk, or those of a trunk to the
    front of rows.

    Attributes:
        source: What is read.
        targets: What is written.
        size: The most positions that one of them needs.
    """

    source: Segment
    targets: tuple[Trunk] | tuple[Row, ...]
    size: int


@frozen
class Fork:
    """Copy the first columns of rows to other rows, pair by pair.

    Attributes:
        sources: The rows to read; none of them is a target.
        targets: The rows to write.
        columns: The most columns that one of them needs.
    """

    sources: tuple[Row, ...]
    targets: tuple[Row, ...]
    columns: int


@frozen
class Shift:
    """Move the columns of rows from ``by`` on to their front. If this fails, the rows are lost.

    Attributes:
        rows: The rows.
        by: The first column to move.
        columns: The most columns that one of them then needs.
    """

    rows: tuple[Row, ...]
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
    """Make a row zero from a column on."""

    row: Row
    first: int


Command = Resize | NewTrunk | Copy | Fork | Shift | Join | Blank


class Table(Protocol):
    """The engine's part: rows of equal length, and trunks."""

    def do(self, command: Command) -> None:
        """Carry out a command.

        Raises:
            Exception: it was not carried out; the planner's caller gets the error.
        """

    def limit(self, used: int) -> int:
        """The most positions that rows and trunks may take together.

        Args:
            used: What the current batch and pinned contexts take. If there are longer rows, this
                may be up to twice what they need, because all rows have the same length.
        """
