"""Placements: where sequences run."""

from __future__ import annotations

from typing import Generic, TypeVar

from attrs import define, field

from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.segments import Row, Segment, Trunk

A = TypeVar("A", bound=TokenSequence)


@define(eq=False)
class Placement(Generic[A]):
    """Where a sequence runs.

    Attributes:
        index: The number of the sequence among those asked.
        sequence: The sequence.
        found: The segment that it starts from.
        shared: How many leading tokens it has in common with that.
        start: The first position to compute; all before it are already there.
        row: The row that the sequence ends in; ``None`` if it ends in ``trunk``.
        trunk: A trunk that is computed for this sequence, before the row.
        continued: Whether the row already held a prefix of this sequence.
        kept: Whether the sequence's state is kept; if not, its context is already there.
        parent: The segment that its first new segment stands on.
        base: The first position of that segment.
        source: What positions ``base`` to ``start`` are copied from.
        cut: Where the new trunk stops; ``base`` if there is none.
    """

    index: int
    sequence: A
    found: Segment | None = None
    shared: int = 0
    start: int = field(init=False)
    row: Row | None = None
    trunk: Trunk | None = None
    continued: bool = False
    kept: bool = field(init=False)
    parent: Trunk | None = None
    base: int = 0
    source: Segment | None = None
    cut: int = 0

    def __attrs_post_init__(self) -> None:
        self.start = min(self.shared, self.sequence.latest_start)
        self.kept = self.shared < self.sequence.length

    @property
    def end(self) -> Segment:
        """The segment that the sequence ends in."""
        end = self.row or self.trunk
        assert end is not None, "the sequence has not been placed"
        return end

    @property
    def needs_row(self) -> bool:
        """Whether it takes a new row."""
        return not self.continued and self.cut < self.sequence.length

    @property
    def tail(self) -> int:
        """How many columns the sequence takes in its row."""
        if self.continued and self.row is not None:
            return self.sequence.length - self.row.start
        return self.sequence.length - max(self.base, self.cut)

    def segments(self, start: int, stop: int) -> list[tuple[Segment, int, int]]:
        """Where positions ``start`` to ``stop`` (exclusive) go: segments, each with the start and
        stop of its positions."""
        if self.trunk is None:
            return [(self.end, start, stop)] if start < stop else []
        found: list[tuple[Segment, int, int]] = []
        if start < (below := min(stop, self.trunk.stop)):
            found.append((self.trunk, start, below))
            start = below
        if start < stop and self.row is not None:
            found.append((self.row, start, stop))
        return found
