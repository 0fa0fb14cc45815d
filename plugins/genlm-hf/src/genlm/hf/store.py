"""The key/value store: which rows are kept, where a job starts from, what must go when the budget
is spent."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from attrs import define, frozen

from genlm.core.logs import get_logger
from genlm.core.types import Adapter
from genlm.hf.index import PrefixIndex, Row
from genlm.hf.job import Job, key_prefix
from genlm.hf.pool import RowPool

logger = get_logger()

#: Columns are allotted in steps of this many.
COLUMN_STEP = 64


@frozen(eq=False)
class Placement:
    """Where a job runs.

    Attributes:
        job: The job.
        slot: Its row of the pool.
        start: The first position to compute; all before it is there already.
        continued: The kept row that it continues in place; ``None`` for a new row.
    """

    job: Job
    slot: int
    start: int
    continued: Row | None


@define(eq=False)
class _Plan:
    """What a batch needs, before anything is moved."""

    matches: list[tuple[Row | None, int]]
    in_place: dict[int, Row]
    needed: int
    protected: set[int]


class KVStore:
    """Keeps the state of contexts as rows of a pool, within a budget, least recently used first
    out.

    A job starts from the kept row that shares the longest prefix with it. If it extends the whole
    row, or ends within it, it runs in that very row, and nothing is copied; else the shared prefix
    is copied to a new row. A row's state is valid up to its key; what lies beyond is never read, so
    a forward that fails leaves the store sound.

    Args:
        pool: The tensors.
        budget: The most bytes that they may take.
    """

    def __init__(self, pool: RowPool, budget: int) -> None:
        self._pool = pool
        self._budget = budget
        self._index = PrefixIndex()
        self._pinned: list[Row] = []
        self._free: list[int] = []  # descending, so that the lowest is taken first
        self._tick = 0

    def fits(self, length: int) -> bool:
        """Whether a context of this length can be kept beside the pinned ones."""
        return self._limit(max(_columns(length), self._longest(self._pinned))) > len(self._pinned)

    def known(self, job: Job) -> int:
        """How many leading tokens of a job need not be computed."""
        return min(self._index.longest(job.key)[1], job.latest_start)

    def place(self, jobs: Sequence[Job]) -> list[Placement]:
        """Place as many of ``jobs`` as fit together, from the first on: at least one if it
        :meth:`fits`."""
        self._tick += 1
        while jobs:
            plan = self._plan(jobs, alone=len(jobs) == 1)
            if self._make_room(plan, jobs):
                return self._carry_out(plan, jobs)
            jobs = jobs[: len(jobs) // 2]
        return []

    def commit(self, placements: Sequence[Placement]) -> None:
        """Record that the jobs have been computed."""
        for placement in placements:
            if (
                placement.continued is not None
                and placement.continued.length < placement.job.length
            ):
                self._index.remove(placement.continued)
        for placement in placements:
            self._record(placement)

    def abandon(self, placements: Sequence[Placement]) -> None:
        """Give back the new rows of jobs that failed."""
        self._release(placement.slot for placement in placements if placement.continued is None)

    def pin(self, job: Job) -> bool:
        """Keep a committed job's row until :meth:`clear`; ``False`` if there is none."""
        row, shared = self._index.longest(job.key)
        if row is None or shared < job.length:
            return False
        if not row.pinned:
            row.pinned = True
            self._pinned.append(row)
        return True

    def clear(self) -> None:
        """Drop everything and release the memory."""
        self._index, self._pinned = PrefixIndex(), []
        self._resize(0, 0)

    def drop_unpinned(self) -> None:
        """Drop all rows but the pinned ones and release the memory."""
        for row in self._index.rows():
            if not row.pinned:
                self._index.remove(row)
        self._resize(len(self._pinned), self._longest(self._pinned))

    def drop_adapter(self, adapter: Adapter) -> None:
        """Drop the rows computed with an adapter, pinned ones included."""
        header = key_prefix(adapter)
        for row in self._index.rows():
            if row.key.startswith(header):
                self._evict(row)

    def check_integrity(self) -> None:
        """Raises: RuntimeError: rows and places do not add up."""
        slots = sorted([row.slot for row in self._index.rows()] + self._free)
        if slots != list(range(self._pool.rows)):
            raise RuntimeError(
                f"the rows' places {slots} are not exactly those of a pool of {self._pool.rows} "
                "rows"
            )
        if any(row.length > self._pool.columns for row in self._index.rows()):
            raise RuntimeError(f"a row is longer than the pool's {self._pool.columns} columns")

    # --- planning ---------------------------------------------------------------------------------

    def _plan(self, jobs: Sequence[Job], alone: bool) -> _Plan:
        matches = [self._index.longest(job.key) for job in jobs]
        in_place: dict[int, Row] = {}
        taken: set[int] = set()
        for at, (job, (row, shared)) in enumerate(zip(jobs, matches, strict=True)):
            if row is None or row.slot in taken:
                continue
            extends = shared == row.length and not row.pinned
            if extends or shared == job.length:
                in_place[at] = row
                taken.add(row.slot)
        protected = {row.slot for row, _ in matches if row is not None}
        plan = _Plan(matches, in_place, len(jobs) - len(in_place), protected)
        # Not even beside its own source: start from nothing.
        if alone and not self._affordable(plan, jobs):
            plan = _Plan([(None, 0)], {}, 1, set())
        return plan

    def _affordable(self, plan: _Plan, jobs: Sequence[Job]) -> bool:
        staying = [row for row in self._index.rows() if row.pinned or row.slot in plan.protected]
        columns = max(self._longest(staying), *(_columns(job.length) for job in jobs))
        return len(staying) + plan.needed <= self._limit(columns)

    def _make_room(self, plan: _Plan, jobs: Sequence[Job]) -> bool:
        """Evict and resize until the plan's new rows are free; ``False`` if the budget does not
        allow it."""
        if not self._affordable(plan, jobs):
            return False
        width = max(_columns(job.length) for job in jobs)
        victims = sorted(
            (
                row
                for row in self._index.rows()
                if not row.pinned and row.slot not in plan.protected
            ),
            key=lambda row: row.used,
            reverse=True,
        )
        staying = self._index.rows()
        while len(staying) + plan.needed > self._limit(max(width, self._longest(staying))):
            self._evict(victims.pop())
            staying = self._index.rows()
        self._grow(len(staying) + plan.needed, max(width, self._longest(staying)))
        return True

    def _grow(self, rows: int, columns: int) -> None:
        """Make room for at least so many rows and columns, and for some more where the budget
        allows it.

        Fresh memory is dear, so forks should find their rows there already, and growth by one token
        should seldom move all.
        """
        pool = self._pool
        if rows <= pool.rows and columns <= pool.columns:
            return
        spare_rows = pool.rows if rows <= pool.rows else rows + -(-rows // 2)
        spare_columns = (
            pool.columns
            if columns <= pool.columns
            else max(columns, _columns(pool.columns * 5 // 4))
        )
        if rows > self._limit(spare_columns):
            spare_columns = columns
        self._resize(max(rows, min(spare_rows, self._limit(spare_columns))), spare_columns)

    def _carry_out(self, plan: _Plan, jobs: Sequence[Job]) -> list[Placement]:
        placements = []
        forks: list[tuple[int, int, int]] = []
        for at, (job, (row, shared)) in enumerate(zip(jobs, plan.matches, strict=True)):
            start = min(shared, job.latest_start)
            continued = plan.in_place.get(at)
            if row is not None:
                row.used = self._tick
            slot = continued.slot if continued is not None else self._free.pop()
            if continued is None and row is not None and start > 0:
                forks.append((row.slot, slot, start))
            placements.append(Placement(job, slot, start, continued))
        if forks:
            sources, targets, lengths = zip(*forks, strict=True)
            self._pool.fork(sources, targets, max(lengths))
        return placements

    # --- bookkeeping ------------------------------------------------------------------------------

    def _record(self, placement: Placement) -> None:
        job, row = placement.job, placement.continued
        if row is not None and row.length >= job.length:
            return  # it ended within the row, which stays what it was
        twin = self._index.get(job.key)
        if twin is not None and twin.pinned:
            self._release([placement.slot])
            return
        if twin is not None:
            self._evict(twin)
        if row is None:
            row = Row(placement.slot, job.key)
        row.key, row.used = job.key, self._tick
        self._index.add(row)

    def _evict(self, row: Row) -> None:
        self._index.remove(row)
        if row.pinned:
            self._pinned.remove(row)
        self._release([row.slot])

    def _release(self, slots: Iterable[int]) -> None:
        self._free = sorted([*self._free, *slots], reverse=True)

    def _resize(self, rows: int, columns: int) -> None:
        """Resize the pool, rows moved to its front."""
        kept = sorted(self._index.rows(), key=lambda row: row.slot)
        try:
            self._pool.resize(rows, columns, [row.slot for row in kept])
        except torch.OutOfMemoryError:  # with some layers moved and others not, no row is whole
            logger.warning(
                "kv.lost", rows=len(kept), pinned=len(self._pinned), reason="out of memory"
            )
            self.clear()
            raise
        for slot, row in enumerate(kept):
            row.slot = slot
        self._free = list(range(rows - 1, len(kept) - 1, -1))
        logger.debug("kv.resized", rows=rows, columns=columns, kept=len(kept))

    def _longest(self, rows: Sequence[Row]) -> int:
        return max((_columns(row.length) for row in rows), default=0)

    def _limit(self, columns: int) -> int:
        """How many rows of so many columns the budget allows."""
        return self._budget // max(columns * self._pool.bytes_per_column, 1)


def _columns(length: int) -> int:
    return -(-length // COLUMN_STEP) * COLUMN_STEP
