"""The key/value store: which state is kept, where a sequence starts from, what must go when the
budget is spent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import torch

from genlm.core.engines.prefixes import PrefixIndex, prefix_of, tokens_in
from genlm.core.engines.segments import Row, Segment, Trunk
from genlm.core.logs import get_logger
from genlm.core.types import Adapter
from genlm.hf.assignment import Assignment, Needs, Plan
from genlm.hf.pool import RowPool
from genlm.hf.sequence import TokenSequence, key_prefix
from genlm.hf.sharing import (
    COLUMN_STEP,
    MOST_OUTLIERS,
    MOST_TRUNKS,
    MOST_WASTE,
    SPARE_COLUMNS,
    WORTH_A_TRUNK,
    WORTH_COLLECTING,
    WORTH_SHARING,
    best_cut,
    columns_of,
    common_parts,
    is_worth_a_product,
    outliers_of,
)

logger = get_logger()


class KVStore:
    """Keeps the state of contexts as a tree of segments, within a budget, least recently used first
    out.

    A sequence starts from the kept context that shares the longest prefix with it. If it extends
    that context, or ends within its row, it runs in that very row, and nothing is copied. Else it
    is a fork: a long shared prefix is (or becomes) a trunk, a short one is copied to a new row. A
    row's state is valid up to its key. What lies beyond is never read, so a forward that fails
    leaves the store sound.

    Args:
        pool: The tensors.
        budget: The most bytes that they may take.
        trunks: Whether prefixes may be shared; else every context has a row of its own.
    """

    def __init__(self, pool: RowPool, budget: int, trunks: bool = True) -> None:
        self._pool = pool
        self._budget = budget
        self._shares = trunks
        self._index: PrefixIndex[bytes, Segment] = PrefixIndex()
        self._running: set[Segment] = set()  # of assignments, not in the index yet
        self._trunk_positions = 0
        self._free: list[int] = []  # descending, so that the lowest is taken first

    # --- what is known ----------------------------------------------------------------------------

    def fits(self, length: int) -> bool:
        """Whether a context of this length can be kept beside the pinned ones."""
        staying = self._with_paths(one for one in self._index.values() if one.pinned)
        taken = sum(one.size for one in staying if isinstance(one, Trunk))
        rows = [one.size for one in staying if isinstance(one, Row)]
        if self._shares and length >= WORTH_A_TRUNK:
            taken += length
        else:
            rows.append(length)
        return taken + len(rows) * columns_of(max(rows, default=0)) <= self._limit

    def known(self, sequence: TokenSequence) -> int:
        """How many leading tokens of a sequence need not be computed."""
        if prefix_of(sequence.key, sequence.latest_start) in self._index:
            return sequence.latest_start  # as a rule, and found faster
        return min(self._nearest(sequence.key)[1], sequence.latest_start)

    @property
    def positions(self) -> int:
        """How many positions memory is taken for."""
        return self._pool.rows * self._pool.columns + self._trunk_positions

    # --- running sequences ------------------------------------------------------------------------

    def place(
        self, sequences: Sequence[TokenSequence], shared: Mapping[int, int] | None = None
    ) -> list[Assignment]:
        """Place as many of ``sequences`` as fit together, from the first on: at least one if it
        :meth:`fits`.

        Args:
            sequences: The sequences.
            shared: For some of them, by index, how many leading tokens others share that will be
                asked next.
        """
        shared = shared or {}
        if self._shares:
            self._share_forked(sequences)
        while sequences:
            plans = self._planned(sequences, shared)
            needs = self._needs(plans)
            if self._shares and self._share_common(needs):
                plans = self._planned(sequences, shared)
                needs = self._needs(plans)
            if not self._affordable(needs) and len(sequences) == 1:
                # Not even beside its own source: start from nothing, in the cheapest way.
                plans = [self._from_nothing(sequences[0])]
                needs = self._needs(plans)
            if self._affordable(needs):
                self._make_room(needs)
                return self._carried_out(plans)
            sequences = sequences[: len(sequences) // 2]
        return []

    def commit(self, assignments: Sequence[Assignment]) -> None:
        """Record that the sequences have been computed."""
        for one in assignments:  # first all: the new key of one may be the old key of another
            if one.kept and one.continued and one.row is not None:
                self._index.remove(one.row.key)
        for one in assignments:
            self._record(one)
        # Last: it drops what is kept, and may fail.
        rows: set[Segment] = {one.row for one in assignments if one.row is not None}
        for one in assignments:
            if one.trunk is not None and self._index.get(one.trunk.key) is one.trunk:
                self._shorten(one.trunk, rows)

    def abandon(self, assignments: Sequence[Assignment]) -> None:
        """Give back the new segments of sequences that failed."""
        for one in assignments:
            if one.row is not None and not one.continued:
                self._discard(one.row)
            if one.trunk is not None:
                self._discard(one.trunk)

    def blank(self, assignments: Sequence[Assignment]) -> None:
        """Overwrite what abandoned sequences have written into rows, which may be no numbers: a
        masked column still takes part in the products."""
        for one in assignments:
            if one.row is not None:
                valid = one.row.stop if one.continued else one.start
                self._pool.blank(one.row.slot, max(valid - one.row.start, 0))

    # --- what stays and what goes -----------------------------------------------------------------

    def pin(self, sequence: TokenSequence) -> bool:
        """Keep a committed sequence's state until :meth:`clear`; ``False`` if there is none."""
        found, shared = self._nearest(sequence.key)
        if found is None or shared < sequence.length:
            return False
        key = sequence.key
        while found.parent is not None and found.start >= sequence.length:
            found = found.parent
        if self._shares and isinstance(found, Row) and sequence.length - found.start >= COLUMN_STEP:
            self._to_trunk([found], sequence.length, set())
            found = self._index.get(key) or found
        found.pinned = True
        return True

    def clear(self) -> None:
        """Drop everything and release the memory."""
        for one in list(self._index.values()):
            one.leave()
        self._index.clear()
        self._running.clear()
        self._trunk_positions = 0
        self._resize(0, 0)

    def drop_unpinned(self) -> None:
        """Drop all but the pinned contexts and release the memory."""
        staying = self._with_paths(one for one in self._index.values() if one.pinned)
        for one in list(self._index.values()):
            if one not in staying:
                self._drop(one)
        rows = self._rows()
        self._resize(len(rows), max((columns_of(row.size) for row in rows), default=0))

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drop the state computed with an adapter, pinned or not."""
        header = key_prefix(adapter)
        for one in list(self._index.values()):
            if one.key.startswith(header):
                self._drop(one)

    def check_integrity(self) -> None:
        """Raises: RuntimeError: segments, places and memory do not add up."""
        rows = self._rows()
        slots = sorted([row.slot for row in rows] + self._free)
        if slots != list(range(self._pool.rows)):
            raise RuntimeError(f"rows {slots} are not those of a pool of {self._pool.rows} rows")
        if any(row.size > self._pool.columns for row in rows):
            raise RuntimeError(f"a row is longer than the pool's {self._pool.columns} columns")
        kept = {*self._index.values(), *self._running}
        trunks = {one for one in kept if isinstance(one, Trunk)}
        if sum(trunk.size for trunk in trunks) != self._trunk_positions:
            raise RuntimeError(f"trunks do not take {self._trunk_positions} positions")
        for one in self._index.values():
            if self._index.get(one.key) is not one:
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

    # --- planning ---------------------------------------------------------------------------------

    def _nearest(self, key: bytes) -> tuple[Segment | None, int]:
        """What shares the most leading tokens with ``key``, and how many."""
        nearest, common = self._index.nearest(key)
        shared = tokens_in(common)
        if nearest is None or shared == 0:
            return None, 0
        # Among equals what ends there is preferred: it can be continued in place.
        ends_there = self._index.get(prefix_of(key, shared))
        return ends_there or self._index[nearest], shared

    def _planned(self, sequences: Sequence[TokenSequence], shared: Mapping[int, int]) -> list[Plan]:
        taken: set[Segment] = set()
        plans = []
        for at, sequence in enumerate(sequences):
            plan = self._plan(sequence, shared.get(at, 0), taken)
            if plan.row is not None:
                taken.add(plan.row)
            plans.append(plan)
        if self._shares:
            self._set_apart(plans)
        return plans

    def _plan(self, sequence: TokenSequence, shared: int, taken: set[Segment]) -> Plan:
        found, common = self._nearest(sequence.key)
        start = min(common, sequence.latest_start)
        kept = common < sequence.length
        if isinstance(found, Row) and found not in taken and start >= found.start:
            extends = common == found.stop and not found.pinned
            if extends or not kept:
                return Plan(sequence, start, found, found.parent, found.start, row=found, kept=kept)
        below = found
        while below is not None and start <= below.start:
            below = below.parent
        plan = Plan(sequence, start, found, kept=kept)
        if isinstance(below, Trunk) and is_worth_a_product(below, start):
            plan.parent, plan.base = below, start
        elif below is not None:
            plan.parent, plan.base, plan.source = below.parent, below.start, below
        plan.cut = self._cut(plan, shared) if kept else plan.base
        return plan

    def _from_nothing(self, sequence: TokenSequence) -> Plan:
        plan = Plan(sequence)
        plan.cut = self._cut(plan, 0)
        return plan

    def _cut(self, plan: Plan, shared: int) -> int:
        """Where a new context's own trunk stops: where others will fork, or at its end if it is
        long."""
        if self._shares and shared - plan.base >= WORTH_A_TRUNK:
            return shared
        long = self._shares and plan.sequence.length - plan.start >= WORTH_A_TRUNK
        return plan.sequence.length if long else plan.base

    def _set_apart(self, plans: Sequence[Plan]) -> None:
        """Give trunks of their own to the few new contexts that would make all rows longer."""
        tails: list[tuple[int, Plan | None]] = [(row.size, None) for row in self._rows()]
        tails += [(plan.tail, plan) for plan in plans if plan.needs_row or plan.row is not None]
        for plan in outliers_of(tails):
            if plan is not None and plan.row is None and plan.kept:
                plan.cut = plan.sequence.length

    # --- trunks -----------------------------------------------------------------------------------

    def _share_forked(self, sequences: Sequence[TokenSequence]) -> None:
        """Turn into trunks what several contexts are about to share, and the few rows that make
        all others longer."""
        wanted: dict[Row, list[int]] = {}
        protected: set[Segment] = set()
        for sequence in sequences:
            found, shared = self._nearest(sequence.key)
            if found is not None:
                protected.add(found)
            if isinstance(found, Row):
                wanted.setdefault(found, []).append(min(shared, sequence.latest_start))
        for row, cuts in wanted.items():
            # One that extends the row, or ends in it, runs there: nothing is shared.
            alone = len(cuts) == 1 and cuts[0] >= row.stop - 1 and not row.pinned
            cut, saved = best_cut(cuts, row.start)
            if not alone and (saved >= WORTH_SHARING or cut - row.start >= WORTH_A_TRUNK):
                self._to_trunk([row], cut, protected)
        for row in outliers_of([(row.size, row) for row in self._rows()]):
            # Room for the one before may have been made of this one.
            if self._index.get(row.key) is row:
                self._to_trunk([row], row.stop, protected)

    def _share_common(self, needs: Needs) -> bool:
        """Turn into trunks what rows have in common, the most first, then the few that are longer
        than all others: where the pool would take much more than is in it.

        Returns:
            Whether some were.
        """
        changed = False
        while True:
            rows = [row for row in self._rows() if row not in self._running]
            count = len(rows) + len(self._running) + needs.rows
            columns = max(needs.columns, *(columns_of(row.size) for row in rows), 0)
            if count <= self._pool.rows and columns <= self._pool.columns:
                return changed
            commons = common_parts(rows)
            kept = sum(row.size for row in self._rows()) + needs.new
            kept -= sum(one.copies for one in commons)
            if count * columns <= MOST_WASTE * kept + SPARE_COLUMNS * count:
                return changed
            best = max((one.best() for one in commons), key=lambda one: one[0], default=None)
            if best is not None and best[0] >= WORTH_COLLECTING:
                chosen = [best[1:]]
            else:
                long = [row for row in rows if row.size >= columns - COLUMN_STEP]
                used = needs.protected.intersection(long)
                few = len(used) <= MOST_OUTLIERS and 2 * len(long) <= len(rows)
                if not long or not few or columns <= 2 * COLUMN_STEP:
                    return changed
                chosen = [([row], row.stop) for row in long]
            staying = needs.protected.union(*(some for some, _ in chosen))
            for some, cut in chosen:
                if not self._to_trunk(some, cut, staying):
                    return changed
                changed = True

    def _to_trunk(self, rows: Sequence[Row], cut: int, protected: set[Segment]) -> bool:
        """Store as a trunk what some rows have in common up to position ``cut``; what is left of
        them stands on that.

        Returns:
            ``False`` where the budget does not allow it; then nothing was done.
        """
        row = rows[0]
        size = cut - row.start
        key = prefix_of(row.key, cut)
        trunk = self._index.get(key)
        if not isinstance(trunk, Trunk):
            needs = Needs(trunks=size, protected={*protected, *rows})
            if not self._affordable(needs):
                return False
            self._make_room(needs)
            layers = self._pool.new_trunk(size)
            self._pool.from_row(row.slot, size, layers)
            twin = self._index.get(key)
            trunk = Trunk(key, layers=layers)
            if twin is not None:
                trunk.pinned = twin.pinned
                if twin not in rows:
                    self._drop(twin)
            self._trunk_positions += size
            trunk.stand_on(row.parent, row.start)
        longer = [row for row in rows if row.stop > cut]
        for row in rows:
            if row.stop == cut:
                self._drop(row)
        self._index.add(key, trunk)
        for row in longer:
            try:
                self._pool.shift(row.slot, slice(size, row.size))
            except torch.OutOfMemoryError:  # with some layers moved and others not, it is not whole
                logger.warning("kv.lost", rows=1, pinned=int(row.pinned), reason="out of memory")
                self._drop(row)
                raise
            row.stand_on(trunk, cut)
        self._shorten(trunk, protected)
        return True

    def _shorten(self, trunk: Trunk, protected: set[Segment]) -> None:
        """Merge trunks that one context alone goes through, and keep the path short."""
        upper = trunk
        while upper.parent is not None:
            below = upper.parent
            mine_alone = below.children == {upper} and not below.pinned
            if mine_alone and below.size <= 2 * upper.size:
                self._merge(upper)  # of like sizes only: nothing is copied more often than log(n)
            else:
                upper = below
        while len(path := [trunk, *(below for below, _ in trunk.path())]) > MOST_TRUNKS:
            others = {
                upper: self._above(below, but=upper)
                for upper, below in pairwise(path)
                if not below.pinned
            }
            free = [
                upper
                for upper, above in others.items()
                if not any(one.pinned or one in protected or one in self._running for one in above)
            ]
            if not free:
                return
            chosen = min(free, key=lambda upper: len(others[upper]))
            for one in others[chosen]:
                self._drop(one)
            self._merge(chosen)

    def _above(self, trunk: Trunk, but: Segment) -> list[Segment]:
        """All that stands on a trunk, except one child and what stands on that."""
        found: list[Segment] = []
        for child in trunk.children:
            if child is not but:
                found.append(child)
                if isinstance(child, Trunk):
                    found.extend(self._above(child, but))
        return found

    def _merge(self, upper: Trunk) -> None:
        """Make a trunk and its parent, whose only child it is, one."""
        below = upper.parent
        if below is None:
            return
        length = upper.start - below.start
        upper.layers = [
            (torch.cat([keys[:, :, :length], more], 2), torch.cat([values[:, :, :length], most], 2))
            for (keys, values), (more, most) in zip(below.layers, upper.layers, strict=True)
        ]
        upper.stand_on(below.parent, below.start)
        self._trunk_positions += length
        self._drop(below)

    # --- room -------------------------------------------------------------------------------------

    @property
    def _limit(self) -> int:
        """The most positions that memory may be taken for."""
        return self._budget // max(self._pool.bytes_per_column, 1)

    def _rows(self) -> list[Row]:
        kept = [one for one in self._index.values() if isinstance(one, Row)]
        return kept + [one for one in self._running if isinstance(one, Row)]

    def _with_paths(self, segments: Iterable[Segment]) -> set[Segment]:
        staying = set(segments)
        for one in list(staying):
            staying.update(trunk for trunk, _ in one.path())
        return staying

    def _needs(self, plans: Sequence[Plan]) -> Needs:
        used = {one for plan in plans for one in (plan.found, plan.parent, plan.source, plan.row)}
        return Needs(
            rows=sum(plan.needs_row for plan in plans),
            columns=max(columns_of(plan.tail) for plan in plans),
            new=sum(plan.sequence.length - max(plan.start, plan.cut) for plan in plans),
            trunks=sum(plan.trunk_size for plan in plans),
            protected={one for one in used if one is not None},
        )

    def _affordable(self, needs: Needs) -> bool:
        pinned = {one for one in self._index.values() if one.pinned}
        staying = self._with_paths(pinned | needs.protected | self._running)
        rows = [one.size for one in staying if isinstance(one, Row)]
        trunks = sum(one.size for one in staying if isinstance(one, Trunk))
        columns = max(needs.columns, *map(columns_of, rows), 0)
        return (len(rows) + needs.rows) * columns + trunks + needs.trunks <= self._limit

    def _make_room(self, needs: Needs) -> None:
        """Drop what was used least recently until there is room, then make the pool so large."""
        rows = Counter(columns_of(row.size) for row in self._rows())
        room = self._limit - self._trunk_positions - needs.trunks
        columns, count = max(needs.columns, *rows, 0), rows.total() + needs.rows
        dropped = True
        while count * columns > room and dropped:
            dropped = False
            for one in list(self._index.values()):
                if one.pinned or one.children or one in needs.protected:
                    continue
                self._drop(one)
                dropped = True
                if isinstance(one, Trunk):
                    room += one.size
                else:
                    rows[columns_of(one.size)] -= 1
                    count -= 1
                    columns = max(needs.columns, *(+rows), 0)
                if count * columns <= room:
                    break
        self._fit(count, columns, room)

    def _fit(self, rows: int, columns: int, room: int) -> None:
        """Give the pool at least ``rows`` rows of ``columns``, at most ``room`` positions in all.

        Allocating memory is slow, so some more rows are allocated where the budget allows it: forks
        find their rows there already.
        """
        pool = self._pool
        too_large = pool.rows * pool.columns > room
        if rows <= pool.rows and columns <= pool.columns and not too_large:
            return
        wide = columns
        if columns > pool.columns and rows * columns_of(columns // 8 * 9) <= room:
            wide = columns_of(columns // 8 * 9) if columns >= 8 * COLUMN_STEP else columns
        # Many where they are short, so that rows of any length have about as much to spare.
        more = min(rows // 2, max(rows // 8, rows * COLUMN_STEP // max(wide, 1)))
        spare = rows if too_large else max(rows + more, pool.rows)
        self._resize(max(rows, min(spare, room // max(wide, 1))), wide)

    def _resize(self, rows: int, columns: int) -> None:
        """Resize the pool, rows moved to its front."""
        kept = sorted(self._rows(), key=lambda row: row.slot)
        try:
            self._pool.resize(rows, columns, [row.slot for row in kept])
        except torch.OutOfMemoryError:  # with some layers moved and others not, no row is whole
            pinned = sum(one.pinned for one in self._index.values())
            logger.warning("kv.lost", rows=len(kept), pinned=pinned, reason="out of memory")
            self.clear()
            raise
        for slot, row in enumerate(kept):
            row.slot = slot
        self._free = list(range(rows - 1, len(kept) - 1, -1))
        logger.debug("kv.resized", rows=rows, columns=columns, kept=len(kept))

    # --- bookkeeping ------------------------------------------------------------------------------

    def _carried_out(self, plans: Sequence[Plan]) -> list[Assignment]:
        # First what may fail.
        memory = [
            self._pool.new_trunk(plan.trunk_size) if plan.trunk_size else [] for plan in plans
        ]
        assignments = []
        forks: list[tuple[int, int, int]] = []
        for plan, layers in zip(plans, memory, strict=True):
            self._touch(plan.found)
            one = Assignment(plan.sequence, plan.start, plan.row, kept=plan.kept)
            assignments.append(one)
            if plan.row is not None:
                one.continued = True
                continue
            parent, base, copied = plan.parent, plan.base, plan.start - plan.base
            if layers:
                key = prefix_of(plan.sequence.key, plan.cut)
                one.trunk = Trunk(key, layers=layers)
                self._enter(one.trunk, parent, base)
                self._trunk_positions += plan.trunk_size
                parent, base = one.trunk, plan.cut
            if plan.needs_row:
                one.row = Row(plan.sequence.key, slot=self._free.pop())
                self._enter(one.row, parent, base)
            source = plan.source
            if source is None or not copied:
                continue
            if isinstance(source, Trunk) or one.trunk is not None:
                self._copy(source, one.trunk or one.row, copied)
            elif isinstance(source, Row) and one.row is not None:
                forks.append((source.slot, one.row.slot, copied))
        if forks:
            sources, targets, lengths = zip(*forks, strict=True)
            try:
                self._pool.fork(sources, targets, max(lengths))
            except BaseException:
                self.abandon(assignments)
                raise
        return assignments

    def _copy(self, source: Segment, target: Segment | None, size: int) -> None:
        """Copy the first positions from or to a trunk."""
        if isinstance(target, Row) and isinstance(source, Trunk):
            self._pool.to_row(source.layers, target.slot, size)
        elif isinstance(target, Trunk) and isinstance(source, Row):
            self._pool.from_row(source.slot, size, target.layers)
        elif isinstance(target, Trunk) and isinstance(source, Trunk):
            with torch.inference_mode():
                for states, others in zip(target.layers, source.layers, strict=True):
                    for mine, other in zip(states, others, strict=True):
                        mine[:, :, :size] = other[:, :, :size]

    def _touch(self, segment: Segment | None) -> None:
        if segment is not None:
            for trunk, _ in segment.path():
                self._index.touch(trunk.key)
            self._index.touch(segment.key)

    def _enter(self, segment: Segment, parent: Trunk | None, start: int) -> None:
        segment.stand_on(parent, start)
        self._running.add(segment)

    def _record(self, one: Assignment) -> None:
        row, trunk = one.row, one.trunk
        if not one.kept:
            if row is not None and not one.continued:
                self._discard(row)
            return
        if trunk is not None:
            twin = self._index.get(trunk.key)
            if isinstance(twin, Trunk):
                if row is not None:
                    row.stand_on(twin, row.start)
                self._discard(trunk)
            else:
                if twin is not None:
                    trunk.pinned = twin.pinned
                    self._drop(twin)
                self._index.add(trunk.key, trunk)
                self._running.discard(trunk)
        if row is not None:
            row.key = one.sequence.key
            twin = self._index.get(row.key)
            if isinstance(twin, Trunk) or (twin is not None and twin.pinned):
                self._discard(row)
                return
            if twin is not None:
                self._drop(twin)
            self._index.add(row.key, row)
            self._running.discard(row)

    def _drop(self, segment: Segment) -> None:
        """Forget a kept segment."""
        self._index.remove(segment.key)
        self._discard(segment)

    def _discard(self, segment: Segment) -> None:
        """Give back what a segment takes."""
        segment.leave()
        self._running.discard(segment)
        if isinstance(segment, Row):
            self._free = sorted([*self._free, segment.slot], reverse=True)
        elif isinstance(segment, Trunk):
            self._trunk_positions -= segment.size
            segment.layers = []
