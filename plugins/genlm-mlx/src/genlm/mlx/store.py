"""The store: contexts as a tree, so that what they share is computed, kept and read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TypeVar

from attrs import define

import mlx.core as mx
from genlm.core.engines.prefixes import (
    PrefixIndex,
    key_of,
    length_of,
    prefix_of,
    shared_length,
    tokens_in,
    tokens_of,
    version_of,
)
from genlm.core.engines.segments import Row, Segment, Trunk
from genlm.core.logs import get_logger
from genlm.mlx.block import Block
from genlm.mlx.layout import Chunk, Layout
from genlm.mlx.pool import ASIDE, LEAST_ASIDE, WORTHWHILE
from genlm.mlx.runner import Cache, Key, Runner
from genlm.mlx.table import Table, allotted, joined

logger = get_logger()

#: A prefix becomes a trunk if it has at least the first of these many positions, and saves at least
#: the second. Each trunk costs two products in every layer of every forward pass.
LEAST_SHARED, LEAST_SAVED = 32, 512

#: A new context with at least this many positions of its own gets a trunk of its own, for rows are
#: all as long as the longest.
WORTH_A_TRUNK = 512

#: Rows may take this many times the positions that they hold; then the longest become trunks.
MOST_WASTE = 2

#: Up to this many tokens before the last of a context are computed together with it. More are
#: computed first, without their logits.
FEW_MORE = 4

#: The most products of queries and keys for each head that one forward pass of a long context
#: computes, unless it would have fewer tokens than this.
MOST_PRODUCTS, LEAST_FED = 1 << 21, 256


S = TypeVar("S", bound=Segment)


@define(eq=False)
class Run:
    """A context that is computed in a row.

    Attributes:
        key: The context.
        row: Where it is computed; its own, or one that holds it already.
        start: The first position to compute.
        kept: Whether the row becomes that context's.
    """

    key: bytes
    row: Row
    start: int
    kept: bool = True

    def chunk(self, start: int, stop: int) -> Chunk:
        tokens = tokens_of(self.key)[start:stop]
        return Chunk(self.row, start, tokens, version_of(self.key))


@define(eq=False)
class Fork:
    """A planned row.

    Attributes:
        key: Its context.
        base: The segment that it starts from; ``None`` where nothing is known.
        start: The first position to compute.
        copied: Whether it copies from ``base``, or else stands on it.
    """

    key: bytes
    base: Segment | None
    start: int
    copied: bool = True

    @property
    def origin(self) -> int:
        """The position of the row's first column."""
        return self.start if self.base is None or not self.copied else self.base.start


class Store:
    """Evaluates contexts, each starting from the longest part of it that is known.

    A context that goes on does so in its row, in place. One that forks copies what its parent's row
    holds, or shares it as a trunk where that is worth it. State beyond a row's key is never read,
    so a forward pass that fails leaves the store sound.

    Args:
        runner: The model.
        max_bytes: The most bytes to keep beside what the last call used; the least recently used
            go first. ``None`` is one and a half times what that takes, 64 MiB at least.
        least_shared: The fewest positions of a trunk that contexts share.
        least_saved: The fewest positions that such a trunk saves.
    """

    def __init__(
        self,
        runner: Runner,
        max_bytes: int | None,
        least_shared: int = LEAST_SHARED,
        least_saved: int = LEAST_SAVED,
    ) -> None:
        self._runner = runner
        self._max_bytes = max_bytes
        self._least_shared, self._least_saved = least_shared, least_saved
        self._table = Table(runner)
        self._index: PrefixIndex[bytes, Segment] = PrefixIndex()
        self._free: list[int] = []  # descending: the lowest is taken first

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return self._table.nbytes + sum(map(_nbytes, self._all(Trunk)))

    # --- what the engine asks for -----------------------------------------------------------------

    def logits(self, keys: Sequence[Key]) -> mx.array:
        """The logits of what follows each of the distinct ``keys``, ``[len(keys), vocab_size]``
        float32."""
        wanted = [_packed(key) for key in keys]
        self._set_apart()
        self._share(wanted)
        runs = self._started(wanted)
        try:
            logits = self._compute(runs)
        except BaseException:
            self._abandon(runs)
            raise
        self._commit(runs)
        self._tidy({run.row for run in runs})
        return logits

    def known(self, key: Key) -> int:
        """How much of ``key`` is known, in its elements: its adapter's version at least."""
        return self._nearest(_packed(key))[1] + 1

    def branch(self, key: Key) -> Block:
        """A block of one row, apart from the store: what is known of ``key`` but its last
        token."""
        name = _packed(key)
        found, common = self._nearest(name)
        cache, known = self._runner.empty_cache(), min(common, length_of(name) - 1)
        if found is not None and known:
            self._touch(found)
            for layer, (keys, values) in zip(cache, self._copied(found, 0, known), strict=True):
                layer.state = keys, values, known
        return Block([key[: known + 1]], cache)

    def pin(self, key: Key) -> None:
        """Compute ``key`` if need be, and keep it until it is dropped."""
        name = _packed(key)
        if self._nearest(name)[1] < length_of(name):
            self.logits([key])
        found, _ = self._nearest(name)
        assert found is not None
        while found.parent is not None and found.start >= length_of(name):
            found = found.parent
        if isinstance(found, Row):
            found = self._grow_trunk(name)
        found.pinned = True

    def drop(self, version: int) -> None:
        """Drop all state of an adapter."""
        mine = [one for one in self._index.values() if version_of(one.key) == version]
        for one in sorted(mine, key=lambda one: -one.start):
            self._forget(one)
        self._tidy(())

    def clear(self) -> None:
        """Drop everything."""
        for one in list(self._index.values()):
            self._forget(one)
        self._resize(0, 0)

    def check_integrity(self) -> None:
        """Raises: RuntimeError: rows, free rows and the tree do not add up."""
        rows = list(self._all(Row))
        slots = sorted([row.slot for row in rows] + self._free)
        if slots != list(range(self._table.slots)):
            raise RuntimeError(f"rows {slots} are not those of a table of {self._table.slots}")
        if any(row.size > self._table.columns for row in rows):
            raise RuntimeError(f"a row is longer than the table's {self._table.columns} columns")
        for one in self._index.values():
            if self._index.get(one.key) is not one:
                raise RuntimeError("a segment is not found by its key")
            below = one.parent
            if below is not None and (
                self._index.get(below.key) is not below
                or one not in below.children
                or shared_length(one.key, below.key) < one.start
            ):
                raise RuntimeError(f"positions before {one.start} are not those of the context")

    # --- the plot ---------------------------------------------------------------------------------

    def _compute(self, runs: Sequence[Run]) -> mx.array:
        ends = {run: length_of(run.key) for run in runs}
        starts = {run: run.start for run in runs}
        more = sum(ends[run] - 1 - run.start for run in runs)
        if more > min(FEW_MORE * len(runs), self._runner.step_size - len(runs)):
            self._feed([run.chunk(run.start, ends[run] - 1) for run in runs])
            starts = {run: ends[run] - 1 for run in runs}
        chunks = [run.chunk(starts[run], ends[run]) for run in runs]
        layout = Layout(chunks)
        logits = self._forward(layout)
        places = dict(zip(map(id, layout.chunks), layout.last, strict=True))
        order = [places[id(chunk)] for chunk in chunks]
        if order != list(range(len(logits))):
            logits = logits[mx.array(order, mx.int32)]
        logits = logits.astype(mx.float32)
        self._evaluate(layout, logits)
        return logits

    def _feed(self, chunks: Iterable[Chunk]) -> None:
        """Compute chunks in order, as many tokens at a time as one forward pass may have."""
        batch: list[Chunk] = []
        room = self._runner.step_size
        for chunk in chunks:
            start = chunk.start
            while start < chunk.stop:
                most = min(room, max(LEAST_FED, MOST_PRODUCTS // (start + room)))
                some = chunk.tokens[start - chunk.start : start - chunk.start + most]
                batch.append(Chunk(chunk.segment, start, some, chunk.version))
                start, room = start + len(some), room - len(some)
                if room == 0 or start < chunk.stop:  # a forward pass has one chunk of a segment
                    self._run(batch)
                    batch, room = [], self._runner.step_size
        if batch:
            self._run(batch)

    def _run(self, chunks: Sequence[Chunk]) -> None:
        layout = Layout(chunks)
        self._forward(layout)
        self._evaluate(layout)

    def _forward(self, layout: Layout) -> mx.array:
        self._table.layout = layout
        try:
            return self._runner.one_by_one(self._table.layers, layout.versions, layout.tokens)
        finally:
            del self._table.layout

    def _evaluate(self, layout: Layout, *wanted: mx.array) -> None:
        trunks = [chunk.segment for chunk in layout.chunks if isinstance(chunk.segment, Trunk)]
        mx.eval(*wanted, [trunk.layers for trunk in trunks])
        self._table.evaluate()

    # --- where contexts start ---------------------------------------------------------------------

    def _nearest(self, key: bytes) -> tuple[Segment | None, int]:
        """What shares the most leading tokens with ``key``, and how many."""
        nearest, common = self._index.nearest(key)
        shared = tokens_in(common)
        if nearest is None or shared == 0:
            return None, 0
        # On a tie, prefer the one that ends there: it can go on in place.
        return self._index.get(prefix_of(key, shared)) or self._index[nearest], shared

    def _started(self, keys: Sequence[bytes]) -> list[Run]:
        """A row for every key: that which it extends, or a new one with what is known of it."""
        found = {key: self._nearest(key) for key in keys}
        going_on = self._going_on(found)
        forks = self._forks({key: one for key, one in found.items() if key not in going_on})
        tails = [length_of(key) - row.start for key, row in going_on.items()]
        tails += [length_of(fork.key) - fork.origin for fork in forks]
        needed = {one for one, _ in found.values() if one is not None}
        self._make_room(len(forks), max(tails), needed)
        for one in needed:
            self._touch(one)
        runs = {fork.key: self._forked(fork) for fork in forks}
        try:
            self._copy(forks, [runs[fork.key].row for fork in forks])
        except BaseException:
            self._abandon(list(runs.values()))
            raise
        for key, row in going_on.items():
            start = min(shared_length(key, row.key), length_of(key) - 1)
            runs[key] = Run(key, row, start, kept=row.stop < length_of(key))
        return [runs[key] for key in keys]

    def _going_on(self, found: Mapping[bytes, tuple[Segment | None, int]]) -> dict[bytes, Row]:
        """The rows that keys extend, or end in: one key each."""
        rows: dict[Row, bytes] = {}
        for key, (one, common) in found.items():
            if isinstance(one, Row) and one not in rows:
                whole = common in (one.stop, length_of(key))
                if whole and min(common, length_of(key) - 1) >= one.start:
                    rows[one] = key
        return {key: row for row, key in rows.items()}

    def _forks(self, found: Mapping[bytes, tuple[Segment | None, int]]) -> list[Fork]:
        forks = []
        for key, (one, common) in found.items():
            start = min(common, length_of(key) - 1)
            while one is not None and one.start >= start:
                one = one.parent
            forks.append(Fork(key, one, start if one is not None else 0))
        together = Counter(fork.base for fork in forks)
        for fork in forks:
            if isinstance(fork.base, Trunk):
                shared = fork.start - fork.base.start
                others = len(fork.base.children) + together[fork.base] - 1
                fork.copied = shared < WORTH_A_TRUNK and not self._worthwhile(others, shared)
        return forks

    def _worthwhile(self, others: int, shared: int) -> bool:
        """Whether to share ``shared`` positions with ``others`` other contexts as a trunk."""
        return shared >= self._least_shared and others * shared >= self._least_saved

    def _forked(self, fork: Fork) -> Run:
        row = Row(fork.key, slot=self._free.pop())
        below = fork.base if fork.base is None or not fork.copied else fork.base.parent
        assert below is None or isinstance(below, Trunk)  # of rows only copies are made
        row.stand_on(below, fork.origin)
        return Run(fork.key, row, fork.start, kept=fork.key not in self._index)

    def _copy(self, forks: Sequence[Fork], rows: Sequence[Row]) -> None:
        """Copy to new rows what they start from."""
        pairs, columns = [], 0
        for fork, row in zip(forks, rows, strict=True):
            if isinstance(fork.base, Row):
                pairs.append((fork.base.slot, row.slot))
                columns = max(columns, fork.start - fork.origin)
        if pairs:
            self._table.fork(pairs, columns)
        for fork, row in zip(forks, rows, strict=True):
            if fork.copied and isinstance(fork.base, Trunk):
                self._table.to_row(fork.base, fork.start - fork.origin, row.slot)

    # --- trunks -----------------------------------------------------------------------------------

    def _share(self, keys: Sequence[bytes]) -> None:
        """Make trunks of what several of ``keys`` share, and of what is new and long."""
        found = {key: self._nearest(key) for key in keys}
        parents = {one for one, common in found.values() if one is not None and common == one.stop}
        if len(parents) < len(keys):  # else all go on where they are
            for prefix, count in self._prefixes(keys):
                own = length_of(prefix) - self._in_trunks(prefix)
                unknown = length_of(prefix) - self._nearest(prefix)[1]
                computed = unknown >= WORTHWHILE and count > 1
                if computed or self._worthwhile(count - 1, own):
                    self._grow_trunk(prefix)
        for key in keys:
            if length_of(key) - 1 - self._nearest(key)[1] >= WORTH_A_TRUNK:
                self._grow_trunk(prefix_of(key, length_of(key) - 1))

    def _prefixes(self, keys: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """What two keys or more begin with, and how many; shorter ones first."""
        prefixes = {
            prefix_of(a, length)
            for a, b in pairwise(sorted(keys))
            if (length := shared_length(a, b)) >= min(WORTHWHILE, self._least_shared)
        }
        return [
            (prefix, sum(key.startswith(prefix) for key in keys))
            for prefix in sorted(prefixes, key=len)
        ]

    def _in_trunks(self, prefix: bytes) -> int:
        """How many leading positions of ``prefix`` lie in trunks."""
        found, common = self._nearest(prefix)
        if found is None:
            return 0
        return common if isinstance(found, Trunk) else min(found.start, common)

    def _grow_trunk(self, prefix: bytes) -> Trunk:
        """Make a trunk that ends with ``prefix``; rows that begin with it stand on it from then
        on."""
        there = self._index.get(prefix)
        if isinstance(there, Trunk):
            return there
        found, common = self._nearest(prefix)
        length, start = length_of(prefix), self._in_trunks(prefix)
        parent = found
        while parent is not None and (isinstance(parent, Row) or parent.start >= start):
            parent = parent.parent
        assert parent is None or isinstance(parent, Trunk)
        parts = [self._copied(found, start, common)] if found is not None and common > start else []
        if common < length:
            parts.append(self._table.new_trunk(length - common))
        trunk = Trunk(prefix, layers=joined(parts))
        trunk.stand_on(parent, start)
        try:
            if common < length:
                tokens = tokens_of(prefix)[common:]
                self._feed([Chunk(trunk, common, tokens, version_of(prefix))])
        except BaseException:
            trunk.leave()
            raise
        self._enter(trunk)
        return trunk

    def _enter(self, trunk: Trunk) -> None:
        """Make a new trunk part of the tree: rows that begin with it move on to it, and a trunk
        below that carries nothing else becomes a part of it."""
        length, start = trunk.stop, trunk.start
        old = self._index.get(trunk.key)
        if old is not None:
            trunk.pinned = old.pinned
            if isinstance(old, Row):
                self._forget(old)
        self._index.add(trunk.key, trunk)
        moved = [
            row
            for row in self._all(Row)
            if row.stop > length
            and (row.parent, row.start) == (trunk.parent, start)
            and row.key.startswith(trunk.key)
        ]
        if moved:
            self._table.shift(moved, length - start)
        for row in moved:
            row.stand_on(trunk, length)
        below = trunk.parent
        while below is not None and below.children == {trunk} and not below.pinned:
            if trunk.start != below.stop:
                break
            trunk.layers = joined([below.layers, trunk.layers])
            parent, start = below.parent, below.start
            self._index.remove(below.key)
            below.layers = []
            trunk.stand_on(parent, start)
            below.leave()
            below = parent

    def _copied(self, found: Segment, start: int, stop: int) -> Cache:
        """A copy of a context's positions."""
        parts, above = [], stop
        one: Segment | None = found
        while one is not None and above > start:
            if one.start < above:
                first = max(one.start, start)
                assert isinstance(one, Row | Trunk)
                parts.append(self._table.read(one, slice(first - one.start, above - one.start)))
                above = first
            one = one.parent
        return joined(parts[::-1])

    # --- what stays and what goes -----------------------------------------------------------------

    def _make_room(self, new: int, tail: int, needed: Collection[Segment]) -> None:
        """Have ``new`` free rows, and columns for ``tail`` positions; drop what was least recently
        used beyond the limit."""
        columns = max(self._table.columns, allotted(tail))
        self._evict(needed, new * columns * self._table.position_bytes)
        rows = self._table.slots + max(0, new - len(self._free))
        if 0 < self._table.slots < rows:
            rows = max(rows, self._table.slots * 5 // 4)  # they may come a few at a time
        if rows > self._table.slots or columns > self._table.columns:
            self._resize(rows, columns)

    def _set_apart(self) -> None:
        """Make trunks of the few rows that would make all others longer."""
        rows = list(self._all(Row)) if self._table.columns > WORTH_A_TRUNK else []
        mean = sum(row.size for row in rows) / max(len(rows), 1)
        for row in rows:
            if row.size > max(MOST_WASTE * mean, WORTH_A_TRUNK):
                self._grow_trunk(prefix_of(row.key, row.stop - 1))

    def _evict(self, needed: Collection[Segment], new: int) -> None:
        """Forget the least recently used beyond the limit; ``new`` bytes are about to be used."""
        staying = {below for one in needed for below in (one, *_path(one))}
        sizes = {one: self._bytes_of(one) for one in self._index.values()}
        in_hand = new + sum(size for one, size in sizes.items() if one in staying)
        aside = sum(size for one, size in sizes.items() if one not in staying and not one.pinned)
        limit = max(LEAST_ASIDE, ASIDE * in_hand) if self._max_bytes is None else self._max_bytes
        while aside > limit:
            gone = [
                one
                for one in self._index.values()
                if one not in staying and not one.pinned and not one.children
            ]
            if not gone:
                return
            for one in gone:
                if aside > limit:
                    aside -= sizes[one]
                    self._forget(one)

    def _bytes_of(self, one: Segment) -> int:
        if isinstance(one, Trunk):
            return _nbytes(one)
        return self._table.columns * self._table.position_bytes

    def _tidy(self, used: Collection[Segment]) -> None:
        """Evict to the limit, and give memory back where much of the table is empty."""
        self._evict(used, 0)
        rows = list(self._all(Row))
        columns = allotted(max((row.size for row in rows), default=0))
        if 2 * len(rows) < self._table.slots or 2 * columns < self._table.columns:
            self._resize(len(rows), columns)

    def _resize(self, slots: int, columns: int) -> None:
        rows = sorted(self._all(Row), key=lambda row: row.slot)
        try:
            self._table.resize(slots, columns, rows)
        except BaseException:  # with some layers moved and others not, no row is whole
            logger.warning("kv.lost", rows=len(rows))
            for row in rows:
                self._forget(row)
            raise
        self._free = list(range(slots - 1, len(rows) - 1, -1))

    def _commit(self, runs: Sequence[Run]) -> None:
        for run in runs:  # first all: one may be about to have the key of another
            if run.kept and self._index.get(run.row.key) is run.row:
                self._index.remove(run.row.key)
        for run in runs:
            if run.kept:
                run.row.key = run.key
                self._index.add(run.key, run.row)
            elif self._index.get(run.row.key) is not run.row:
                self._release(run.row)

    def _abandon(self, runs: Sequence[Run]) -> None:
        for run in runs:
            if self._index.get(run.row.key) is not run.row:
                self._release(run.row)
        try:
            self._table.evaluate()
        except Exception:
            self.clear()

    def _forget(self, one: Segment) -> None:
        self._index.remove(one.key)
        if isinstance(one, Row):
            self._release(one)
        elif isinstance(one, Trunk):
            one.leave()
            one.layers = []

    def _release(self, row: Row) -> None:
        row.leave()
        self._free = sorted([*self._free, row.slot], reverse=True)

    def _touch(self, one: Segment) -> None:
        for each in (*_path(one), one):
            self._index.touch(each.key)

    def _all(self, kind: type[S]) -> Iterator[S]:
        return (one for one in self._index.values() if isinstance(one, kind))


def _packed(key: Key) -> bytes:
    return key_of(key[0], key[1:])


def _nbytes(trunk: Trunk) -> int:
    return sum(int(state.nbytes) for layer in trunk.layers for state in layer)


def _path(one: Segment) -> list[Trunk]:
    return [trunk for trunk, _ in one.path()]
