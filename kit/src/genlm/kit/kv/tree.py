"""The tree: which segments exist, which are kept, and where they are."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from operator import attrgetter

from genlm.core.context import Context
from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import key_of, nearest_of, prefix_of, tokens_in
from genlm.kit.segments import Segment, Slot, Trunk

#: If more than one key in this many has changed, all keys are sorted again.
KEYS_PER_CHANGE = 16


class Tree:
    """Segments of one table.

    Attributes:
        kept: The kept segments, the least recently used first.
        slots: All slots, kept or running.
        running: Segments of a batch that is not committed yet.
        allocated, columns: How many slots the table has, and how long they are.
        slot_positions, trunk_positions: How many positions all slots and all trunks hold.
        state: Another object after every change of what is kept.
    """

    def __init__(self) -> None:
        self.kept: dict[Segment, None] = {}
        self.slots: dict[Slot, None] = {}
        self.running: set[Segment] = set()
        self.allocated = 0
        self.columns = 0
        self.slot_positions = self.trunk_positions = 0
        self.state = object()
        self._pins: set[Segment] = set()
        self._ends: dict[tuple[int, int], Segment] = {}  # the kept segments by name
        self._free: list[int] = []  # a heap, so that the lowest index is taken first
        # The kept segments by key and their sorted keys, as of the last search. Since then, the
        # keys in ``_gone`` were dropped or changed, and the segments in ``_come`` are new or
        # changed.
        self._sorted: list[Segment] = []
        self._keys: list[bytes] = []
        self._gone: list[bytes] = []
        self._come: dict[Segment, None] = {}

    @property
    def positions(self) -> int:
        """For how many positions memory is allocated."""
        return self.allocated * self.columns + self.trunk_positions

    def at_end(self, version: int, context: Context) -> Segment | None:
        """The kept segment that ends where a context does."""
        segment = self._ends.get((version, context.hash_value))
        return segment if segment is not None and segment.context == context else None

    def start_of(self, sequence: TokenSequence) -> tuple[Segment | None, int]:
        """The segment that shares the most leading tokens with a sequence, and how many. In the
        usual step, in which a known context grows by one token, this is one look-up: the new token
        must be computed anyway, whatever other segments share."""
        state, found, shared = sequence.looked_up
        if state is not self.state:  # otherwise nothing has changed since the last look-up
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
        # On a tie, prefer the segment that ends there, because it can be continued in place.
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
        """Sort the kept segments by key: one by one if few have changed, otherwise all again."""
        if KEYS_PER_CHANGE * (len(self._gone) + len(self._come)) > len(self._keys):
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

    def new_slot(self, sequence: TokenSequence, parent: Trunk | None, start: int) -> Slot:
        """A running slot, the first that is free."""
        slot = Slot(sequence.tokens, sequence.version, index=heapq.heappop(self._free))
        slot.stand_on(parent, start)
        self.slot_positions += slot.size
        self.slots[slot] = None
        self.running.add(slot)
        return slot

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
        equal = self._ends.get(segment.name)
        if equal is not None and equal.context == segment.context:
            if isinstance(equal, Trunk):
                for child in list(segment.children):
                    child.stand_on(equal, child.start)
                return self.discard(segment)
            if equal.pinned:
                self.pin(segment)
            self.drop(equal)
        self.running.discard(segment)
        self.kept[segment] = None
        self._ends[segment.name] = segment
        self._come[segment] = None

    def rename(self, slot: Slot, context: Context) -> None:
        """Make a kept slot end with another context. The caller must then keep the slot again."""
        self._unsort(slot)
        del self.kept[slot]
        if self._ends.get(slot.name) is slot:
            del self._ends[slot.name]
        self.slot_positions += context.length - slot.stop
        slot.context, slot.stop = context, context.length
        slot.name = slot.version, context.hash_value

    def cut(self, slot: Slot, stop: int) -> None:
        """Let a kept slot hold no more than the first ``stop`` positions of its context."""
        if stop >= slot.stop:
            return
        context = slot.context.first(stop)
        if stop <= slot.start or self.at_end(slot.version, context) is not None:
            return self.drop(slot)
        self.rename(slot, context)
        slot.begins_like(slot.known_key, stop)
        self.keep(slot)

    def shorten(self, slot: Slot, trunk: Trunk) -> None:
        """Note that a trunk holds the first positions of a slot."""
        self.slot_positions -= trunk.stop - slot.start
        slot.stand_on(trunk, trunk.stop)

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
        if self._ends.get(segment.name) is segment:  # another segment may have the same hash
            del self._ends[segment.name]
        self.discard(segment)

    def discard(self, segment: Segment) -> None:
        """Free what a segment takes."""
        segment.leave()
        self.running.discard(segment)
        self._pins.discard(segment)
        if isinstance(segment, Slot):
            del self.slots[segment]
            self.slot_positions -= segment.size
            heapq.heappush(self._free, segment.index)
        elif isinstance(segment, Trunk):
            self.trunk_positions -= segment.size
            segment.layers = []

    def clear(self) -> None:
        """Forget everything; the table is empty."""
        for segment in [*self.kept, *self.running]:
            segment.leave()
        for emptied in (self.kept, self._ends, self._pins, self.slots, self.running, self._come):
            emptied.clear()
        self._keys, self._sorted, self._gone, self.state = [], [], [], object()
        self.slot_positions = self.trunk_positions = 0
        self.resized(0, 0, ())

    def resized(self, allocated: int, columns: int, kept: Iterable[Slot]) -> None:
        """Note the table's new size, and the slots at its front."""
        slots = list(kept)
        for index, slot in enumerate(slots):
            slot.index = index
        self.allocated, self.columns = allocated, columns
        self._free = list(range(len(slots), allocated))

    def check_integrity(self) -> None:
        """Raises: RuntimeError: segments, places and memory do not add up."""
        indices = sorted([slot.index for slot in self.slots] + self._free)
        if indices != list(range(self.allocated)):
            raise RuntimeError(
                f"slots {indices} are not those of a table of {self.allocated} slots"
            )
        if any(slot.size > self.columns for slot in self.slots):
            raise RuntimeError(f"a slot is longer than the table's {self.columns} columns")
        kept = {*self.kept, *self.running}
        trunks = {segment for segment in kept if isinstance(segment, Trunk)}
        if {segment for segment in kept if isinstance(segment, Slot)} != set(self.slots):
            raise RuntimeError("a slot is neither kept nor running")
        if sum(trunk.size for trunk in trunks) != self.trunk_positions:
            raise RuntimeError(f"shared prefixes do not take {self.trunk_positions} positions")
        if sum(slot.size for slot in self.slots) != self.slot_positions:
            raise RuntimeError(f"slots do not take {self.slot_positions} positions")
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
