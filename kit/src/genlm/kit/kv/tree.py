"""The tree: which segments exist, which are kept, and where they are."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from genlm.core.context import Context
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import key_of, nearest_of, prefix_of, tokens_in
from genlm.kit.segments import Row, Segment, Trunk

#: Of more than one in so many that have changed, all are sorted anew.
FEW = 16


class Tree:
    """Segments of one table.

    Attributes:
        kept: The kept segments, the least recently used first.
        rows: All rows, kept or running.
        running: Segments of a batch that is not committed yet.
        slots, columns: The size of the table.
        row_positions, trunk_positions: How many positions all rows and all trunks hold.
        state: Another object after every change of what is kept.
    """

    def __init__(self) -> None:
        self.kept: dict[Segment, None] = {}
        self.rows: dict[Row, None] = {}
        self.running: set[Segment] = set()
        self.slots = 0
        self.columns = 0
        self.row_positions = self.trunk_positions = 0
        self.state = object()
        self._pins: set[Segment] = set()
        self._ends: dict[tuple[int, int], Segment] = {}  # the kept ones by name
        self._free: list[int] = []  # a heap: the lowest is taken first
        # The kept ones by key, for searches, and the keys, as of the last search; since then some
        # have gone or changed, whose keys these are, and some have come or changed.
        self._sorted: list[Segment] = []
        self._keys: list[bytes] = []
        self._gone: list[bytes] = []
        self._come: dict[Segment, None] = {}

    @property
    def positions(self) -> int:
        """For how many positions memory is allocated."""
        return self.slots * self.columns + self.trunk_positions

    def at_end(self, version: int, context: Context) -> Segment | None:
        """The kept segment that ends where a context does."""
        segment = self._ends.get((version, context.hash_value))
        return segment if segment is not None and segment.context == context else None

    def start_of(self, sequence: TokenSequence) -> tuple[Segment | None, int]:
        """The segment that shares the most leading tokens with a sequence, and how many. In the
        usual step, a known context and a token more, that is one look-up: of what another segment
        might share beyond the parent, all must be computed in any case."""
        state, found, shared = sequence.looked_up
        if state is not self.state:  # else nothing has changed since it was found
            tokens = sequence.tokens
            found = self.at_end(sequence.version, tokens)
            if found is None and tokens.grown:
                parent = self._ends.get((sequence.version, tokens.parent_hash))
                if parent is not None and tokens.starts_with(parent.context):
                    if tokens.grown <= sequence.keep:
                        found = parent
                    else:
                        sequence.continue_key(parent.key, parent.stop)
            found, shared = self.nearest(sequence.key) if found is None else (found, found.stop)
            sequence.looked_up = self.state, found, shared
        return found, shared

    def nearest(self, key: bytes) -> tuple[Segment | None, int]:
        """The segment that shares the most leading tokens with ``key``, and how many."""
        self._sort()
        at, common = nearest_of(self._keys, key)
        shared = tokens_in(common)
        if shared == 0:
            return None, 0
        # On a tie, prefer the one that ends there: it can be continued in place.
        ending = prefix_of(key, shared)
        first = bisect_left(self._keys, ending)
        return self._sorted[first if self._keys[first] == ending else at], shared

    def _unsort(self, segment: Segment) -> None:
        """Note that a kept segment is dropped, or is about to get another key."""
        if segment in self._come:
            del self._come[segment]
        else:
            self._gone.append(segment.key)

    def _sort(self) -> None:
        """Sort the kept ones by key: the few that have changed one by one, else all anew."""
        if FEW * (len(self._gone) + len(self._come)) > len(self._keys):
            self._sorted = sorted(self.kept, key=attrgetter("key"))
            self._keys = [segment.key for segment in self._sorted]
        else:
            for key in self._gone:
                at = bisect_left(self._keys, key)
                del self._keys[at], self._sorted[at]
            for segment in self._come:
                at = bisect_left(self._keys, segment.key)
                self._keys.insert(at, segment.key)
                self._sorted.insert(at, segment)
        self._gone.clear()
        self._come.clear()

    def with_paths(self, segments: Iterable[Segment]) -> set[Segment]:
        """Some segments, and all trunks below them."""
        found = set(segments)
        for segment in list(found):
            found.update(trunk for trunk, _ in segment.path())
        return found

    def pinned(self) -> set[Segment]:
        """The pinned segments, and all trunks below them."""
        return self.with_paths(self._pins)

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

    def touch(self, *segments: Segment) -> None:
        """Make segments and their paths the most recently used."""
        kept = self.kept
        for segment in segments:
            if segment.parent is not None:
                for trunk, _ in segment.path():
                    kept[trunk] = kept.pop(trunk)
            kept[segment] = kept.pop(segment)

    def new_row(self, sequence: TokenSequence, parent: Trunk | None, start: int) -> Row:
        """A running row in a free slot."""
        row = Row(sequence.tokens, sequence.version, slot=heapq.heappop(self._free))
        row.stand_on(parent, start)
        self.row_positions += row.size
        self.rows[row] = None
        self.running.add(row)
        return row

    def new_trunk(self, context: Context, version: int, parent: Trunk | None, start: int) -> Trunk:
        """A running trunk."""
        trunk = Trunk(context, version)
        trunk.stand_on(parent, start)
        self.trunk_positions += trunk.size
        self.running.add(trunk)
        return trunk

    def keep(self, segment: Segment) -> None:
        """Keep a running or renamed segment. If there is an equal trunk, that one stays, and takes
        over the children of this one."""
        self.state = object()
        twin = self._ends.get(segment.name)
        if twin is not None and twin.context == segment.context:
            if isinstance(twin, Trunk):
                for child in list(segment.children):
                    child.stand_on(twin, child.start)
                return self.discard(segment)
            if twin.pinned:
                self.pin(segment)
            self.drop(twin)
        self.running.discard(segment)
        self.kept[segment] = None
        self._ends[segment.name] = segment
        self._come[segment] = None

    def rename(self, row: Row, context: Context) -> None:
        """Let a kept row end where another context does; it must be kept again."""
        self._unsort(row)
        del self.kept[row]
        if self._ends.get(row.name) is row:
            del self._ends[row.name]
        self.row_positions += context.length - row.stop
        row.context, row.stop = context, context.length
        row.name = row.version, context.hash_value

    def cut(self, row: Row, stop: int) -> None:
        """Let a kept row hold no more than the first ``stop`` positions of its context."""
        if stop >= row.stop:
            return
        context = row.context.first(stop)
        if stop <= row.start or self.at_end(row.version, context) is not None:
            return self.drop(row)
        self.rename(row, context)
        row.begins_like(row.known_key, stop)
        self.keep(row)

    def shorten(self, row: Row, trunk: Trunk) -> None:
        """Note that a trunk holds the first positions of a row."""
        self.row_positions -= trunk.stop - row.start
        row.stand_on(trunk, trunk.stop)

    def pin(self, segment: Segment) -> None:
        """Let a segment stay until all is cleared."""
        segment.pinned = True
        self._pins.add(segment)

    def lengthen(self, trunk: Trunk, below: Trunk) -> None:
        """Note that a trunk has taken over the positions of the one below it, which is dropped."""
        self.trunk_positions += trunk.start - below.start
        trunk.stand_on(below.parent, below.start)
        self.drop(below)

    def drop(self, segment: Segment) -> None:
        """Forget a kept segment."""
        self.state = object()
        self._unsort(segment)
        del self.kept[segment]
        if self._ends.get(segment.name) is segment:  # not another one of the same hash
            del self._ends[segment.name]
        self.discard(segment)

    def discard(self, segment: Segment) -> None:
        """Free what a segment takes."""
        segment.leave()
        self.running.discard(segment)
        self._pins.discard(segment)
        if isinstance(segment, Row):
            del self.rows[segment]
            self.row_positions -= segment.size
            heapq.heappush(self._free, segment.slot)
        elif isinstance(segment, Trunk):
            self.trunk_positions -= segment.size
            segment.layers = []

    def clear(self) -> None:
        """Forget everything; the table is empty."""
        for segment in [*self.kept, *self.running]:
            segment.leave()
        for emptied in (self.kept, self._ends, self._pins, self.rows, self.running, self._come):
            emptied.clear()
        self._keys, self._sorted, self._gone, self.state = [], [], [], object()
        self.row_positions = self.trunk_positions = 0
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
        kept = {*self.kept, *self.running}
        trunks = {segment for segment in kept if isinstance(segment, Trunk)}
        if {segment for segment in kept if isinstance(segment, Row)} != set(self.rows):
            raise RuntimeError("a row is neither kept nor running")
        if sum(trunk.size for trunk in trunks) != self.trunk_positions:
            raise RuntimeError(f"trunks do not take {self.trunk_positions} positions")
        if sum(row.size for row in self.rows) != self.row_positions:
            raise RuntimeError(f"rows do not take {self.row_positions} positions")
        if {segment for segment in kept if segment.pinned} != self._pins:
            raise RuntimeError("a pinned segment is not among those that stay")
        for segment in self.kept:
            if self.nearest(segment.key)[0] is not segment:
                raise RuntimeError("a segment is not found by its key")
            if self.at_end(segment.version, segment.context) is not segment:
                raise RuntimeError("a segment is not found by its context")
            if key_of(segment.version, segment.context) != segment.key:
                raise RuntimeError("a segment's key is not that of its context")
            below = segment.parent
            if (below is None) != (segment.start == 0):
                raise RuntimeError(f"a segment from position {segment.start} stands on {below}")
            if below is not None and not (
                below in trunks
                and segment in below.children
                and below.start < segment.start <= below.stop
                and segment.key.startswith(prefix_of(below.key, segment.start))
            ):
                raise RuntimeError("a segment and its parent do not belong together")
            if not segment.children <= kept:
                raise RuntimeError("a segment has a child that is not kept")
