"""Where sequences run: what is planned, what it takes, and the places that are assigned."""

from __future__ import annotations

from attrs import define, field

from genlm.core.engines.segments import Row, Segment, Trunk
from genlm.hf.layout import Chunk
from genlm.hf.sequence import TokenSequence


@define(eq=False)
class Assignment:
    """Where a sequence runs.

    Attributes:
        sequence: The sequence.
        start: The first position to compute; all before it is there already.
        row: The row that the sequence ends in; ``None`` where it ends in ``trunk``.
        trunk: A trunk that is computed for this sequence, before the row.
        continued: Whether the row was there before, with a beginning of this sequence.
        kept: Whether the sequence's state is kept; else its context is in the store already.
    """

    sequence: TokenSequence
    start: int
    row: Row | None
    trunk: Trunk | None = None
    continued: bool = False
    kept: bool = True

    def chunks(self, start: int, stop: int) -> list[Chunk]:
        """Where positions ``start`` to ``stop`` (exclusive) are kept."""
        found = []
        if self.trunk is not None and start < self.trunk.stop:
            found.append(Chunk(self.trunk, start, min(stop, self.trunk.stop)))
            start = found[0].stop
        if start < stop and self.row is not None:
            found.append(Chunk(self.row, start, stop))
        return found


@define(eq=False)
class Plan:
    """What a sequence needs, before anything is moved.

    Attributes:
        sequence: The sequence.
        start: The first position to compute.
        found: What it starts from.
        base: The first position of the new segment; those before it are in ``parent``'s path.
        source: The segment that positions ``base`` to ``start`` are copied from.
        cut: Where the new trunk stops; ``base`` where there is none.
        row: The row that is continued in place.
        kept: See :class:`Assignment`.
    """

    sequence: TokenSequence
    start: int = 0
    found: Segment | None = None
    parent: Trunk | None = None
    base: int = 0
    source: Segment | None = None
    cut: int = 0
    row: Row | None = None
    kept: bool = True

    @property
    def needs_row(self) -> bool:
        return self.row is None and self.cut < self.sequence.length

    @property
    def tail(self) -> int:
        """How many columns the sequence takes in its row."""
        if self.row is not None:
            return self.sequence.length - self.row.start
        return self.sequence.length - max(self.base, self.cut)

    @property
    def trunk_size(self) -> int:
        return max(self.cut - self.base, 0)


@define(eq=False)
class Needs:
    """What plans take, in positions; ``new`` are those that they compute for rows."""

    rows: int = 0
    columns: int = 0
    new: int = 0
    trunks: int = 0
    protected: set[Segment] = field(factory=set)
