"""The tree: which segments exist, which are kept, and where they are."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from genlm.kit.prefixes import PrefixIndex, prefix_of, tokens_in
from genlm.kit.segments import Row, Segment, Trunk


class Tree:
    """Segments of one table.

    Attributes:
        index: The kept segments, by key, the least recently used first.
        rows: All rows, kept or running.
        running: Segments of a batch that is not committed yet.
        slots, columns: The size of the table.
        trunk_positions: How many positions all trunks take.
    """

    def __init__(self) -> None:
        self.index: PrefixIndex[bytes, Segment] = PrefixIndex()
        self.rows: dict[Row, None] = {}
        self.running: set[Segment] = set()
        self.slots = 0
        self.columns = 0
        self.trunk_positions = 0
        self._free: list[int] = []  # a heap: the lowest is taken first

    @property
    def positions(self) -> int:
        """For how many positions memory is allocated."""
        return self.slots * self.columns + self.trunk_positions

    def nearest(self, key: bytes) -> tuple[Segment | None, int]:
        """The segment that shares the most leading tokens with ``key``, and how many."""
        nearest, common = self.index.nearest(key)
        shared = tokens_in(common)
        if nearest is None or shared == 0:
            return None, 0
        # On a tie, prefer the one that ends there: it can be continued in place.
        return self.index.get(prefix_of(key, shared)) or self.index[nearest], shared

    def with_paths(self, segments: Iterable[Segment]) -> set[Segment]:
        """Some segments, and all trunks below them."""
        found = set(segments)
        for one in list(found):
            found.update(trunk for trunk, _ in one.path())
        return found

    def pinned(self) -> set[Segment]:
        """The pinned segments, and all trunks below them."""
        return self.with_paths(one for one in self.index.values() if one.pinned)

    def above(self, trunk: Trunk, but: Segment) -> list[Segment]:
        """All segments on a trunk, except one child and the segments on that."""
        found: list[Segment] = []
        for child in trunk.children:
            if child is not but:
                found.append(child)
                if isinstance(child, Trunk):
                    found.extend(self.above(child, but))
        return found

    # --- changes ----------------------------------------------------------------------------------

    def touch(self, segment: Segment) -> None:
        """Make a segment and its path the most recently used."""
        for trunk, _ in segment.path():
            self.index.touch(trunk.key)
        self.index.touch(segment.key)

    def new_row(self, key: bytes, parent: Trunk | None, start: int) -> Row:
        """A running row in a free slot."""
        row = Row(key, slot=heapq.heappop(self._free))
        row.stand_on(parent, start)
        self.rows[row] = None
        self.running.add(row)
        return row

    def new_trunk(self, key: bytes, parent: Trunk | None, start: int) -> Trunk:
        """A running trunk."""
        trunk = Trunk(key)
        trunk.stand_on(parent, start)
        self.trunk_positions += trunk.size
        self.running.add(trunk)
        return trunk

    def keep(self, segment: Segment) -> None:
        """Index a running segment by its key. If there is an equal trunk, that one stays, and takes
        over the children of this one."""
        twin = self.index.get(segment.key)
        if isinstance(twin, Trunk):
            for child in list(segment.children):
                child.stand_on(twin, child.start)
            return self.discard(segment)
        if twin is not None:
            segment.pinned = twin.pinned
            self.drop(twin)
        self.index.add(segment.key, segment)
        self.running.discard(segment)

    def rename(self, row: Row, key: bytes) -> None:
        """Give a kept row the key of a longer context; it is running until it is kept again."""
        self.index.remove(row.key)
        row.key = key
        self.running.add(row)

    def lengthen(self, trunk: Trunk, below: Trunk) -> None:
        """Note that a trunk has taken over the positions of the one below it, which is dropped."""
        self.trunk_positions += trunk.start - below.start
        trunk.stand_on(below.parent, below.start)
        self.drop(below)

    def drop(self, segment: Segment) -> None:
        """Forget a kept segment."""
        self.index.remove(segment.key)
        self.discard(segment)

    def discard(self, segment: Segment) -> None:
        """Free what a segment takes."""
        segment.leave()
        self.running.discard(segment)
        if isinstance(segment, Row):
            del self.rows[segment]
            heapq.heappush(self._free, segment.slot)
        elif isinstance(segment, Trunk):
            self.trunk_positions -= segment.size
            segment.layers = []

    def clear(self) -> None:
        """Forget everything; the table is empty."""
        for one in [*self.index.values(), *self.running]:
            one.leave()
        self.index.clear()
        self.rows.clear()
        self.running.clear()
        self.trunk_positions = 0
        self.resized(0, 0, ())

    def resized(self, slots: int, columns: int, kept: Iterable[Row]) -> None:
        """Note the table's new size, and the rows at its front."""
        rows = list(kept)
        for slot, row in enumerate(rows):
            row.slot = slot
        self.slots, self.columns = slots, columns
        self._free = list(range(len(rows), slots))

    def check_integrity(self) -> None:
        """Raises: RuntimeError: segments, places and memory do not add up."""
        slots = sorted([row.slot for row in self.rows] + self._free)
        if slots != list(range(self.slots)):
            raise RuntimeError(f"rows {slots} are not those of a table of {self.slots} rows")
        if any(row.size > self.columns for row in self.rows):
            raise RuntimeError(f"a row is longer than the table's {self.columns} columns")
        kept = {*self.index.values(), *self.running}
        trunks = {one for one in kept if isinstance(one, Trunk)}
        if {one for one in kept if isinstance(one, Row)} != set(self.rows):
            raise RuntimeError("a row is neither kept nor running")
        if sum(trunk.size for trunk in trunks) != self.trunk_positions:
            raise RuntimeError(f"trunks do not take {self.trunk_positions} positions")
        for one in self.index.values():
            if self.index.get(one.key) is not one:
                raise RuntimeError("a segment is not found by its key")
            below = one.parent
            if (below is None) != (one.start == 0):
                raise RuntimeError(f"a segment from position {one.start} stands on {below}")
            if below is not None and not (
                below in trunks
                and one in below.children
                and below.start < one.start <= below.stop
                and one.key.startswith(prefix_of(below.key, one.start))
            ):
                raise RuntimeError("a segment and its parent do not belong together")
            if not one.children <= kept:
                raise RuntimeError("a segment has a child that is not kept")
