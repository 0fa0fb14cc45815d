"""The commands: what a table of key/value state is asked to move."""

from __future__ import annotations

from typing import Protocol

from attrs import frozen

from genlm.core.engines.segments import Row, Segment, Trunk


@frozen
class Resize:
    """Change the size of the table.

    Reads and writes every row. Rows need not be whole if this fails: then all are lost.

    Attributes:
        rows, columns: The new size.
        kept: The rows that stay. Slot ``kept[i]`` becomes slot ``i``; the columns that the new size
            has are kept. Everything else must be finite, such as zero: masked columns take part in
            products.
    """

    rows: int
    columns: int
    kept: tuple[int, ...]


@frozen
class NewTrunk:
    """Take memory for all positions of a trunk, and store it as ``trunk.layers``."""

    trunk: Trunk


@frozen
class Copy:
    """Copy the first positions of a segment to the front of another; one of them is a trunk."""

    source: Segment
    target: Segment
    size: int


@frozen
class Fork:
    """Copy the first columns of rows to other rows, pair by pair.

    Attributes:
        sources: What is read; none of them is a target.
        targets: What is written.
        columns: How many columns any of them needs.
    """

    sources: tuple[Row, ...]
    targets: tuple[Row, ...]
    columns: int


@frozen
class Shift:
    """Move the columns of a row from ``by`` to ``row.size`` to its front. If this fails, the row is
    lost."""

    row: Row
    by: int


@frozen
class Join:
    """Put the first ``size`` positions of the trunk below in front of those of ``trunk``. If this
    fails, ``trunk`` must be as before."""

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
    """What an engine offers: rows of equal length, and trunks beside them."""

    def do(self, command: Command) -> None:
        """Carry out a command.

        Raises:
            Exception: it was not carried out; the planner's caller gets the error.
        """

    def limit(self, used: int) -> int:
        """The most positions that rows and trunks may take together.

        Args:
            used: What the batch in front and pinned contexts take of them. Beside longer rows that
                may be up to twice what they need, since rows are all as long.
        """
