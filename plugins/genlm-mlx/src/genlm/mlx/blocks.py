"""Blocks of key/value rows, for caches that the planner's table cannot hold: recurrent states, and
attention that mlx-lm computes in another way. Shared prefixes are computed once, and known ones are
not computed again."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter, itemgetter

from attrs import frozen

import mlx.core as mx
from genlm.core import Query
from genlm.kit.prefixes import PrefixIndex, common_length
from genlm.mlx.aside import Aside
from genlm.mlx.block import RowBlock
from genlm.mlx.runner import Cache, Key, Runner, key_of

#: The least tokens for which a shared prefix is computed first, a longer row is trimmed and used,
#: and state that cannot be trimmed is kept when a context extends it.
WORTHWHILE = 16

#: If at least this share of a block stays when rows leave it, the block is not changed: a copy
#: costs more than the unused room.
STAYS_WHOLE = 1 / 4

#: Rows with at most this many padded positions are always evaluated together.
TOLERATED_PADDING = 4096


@frozen(eq=False)
class Place:
    """Where a row is."""

    block: RowBlock
    row: int

    @property
    def key(self) -> Key:
        return self.block.keys[self.row]


class Blocks:
    """Evaluates contexts, each starting from the longest part of it that some row holds.

    Rows that contexts extend move to a new block: their tokens can still be found as a prefix. They
    leave unused room in the old block, until the block is dropped or little else of it is left.
    Rows that took a long prefill also stay, if their state cannot be trimmed when it has grown
    (recurrent, or a window that wraps).

    Args:
        runner: The model.
        max_bytes: The most bytes to keep besides pinned rows and those of the last call; the least
            recently used blocks are dropped first. For ``None`` see
            :class:`~genlm.mlx.aside.Aside`.
        ragged: Whether rows of unequal length can be fed together.
    """

    def __init__(self, runner: Runner, max_bytes: int | None, ragged: bool = True) -> None:
        self._runner = runner
        self._aside = Aside(max_bytes)
        self._ragged = ragged
        self._blocks: list[RowBlock] = []
        self._index: PrefixIndex[Key, Place] = PrefixIndex()
        self._tick = 0

    def __len__(self) -> int:
        return len(self._index)

    @property
    def nbytes(self) -> int:
        return _nbytes(self._blocks)

    def logits(self, queries: Sequence[Query]) -> mx.array:
        """The logits of the next token of each of the distinct ``queries``, ``[len(queries),
        vocab_size]`` float32."""
        keys = [key_of(query) for query in queries]
        self._tick += 1
        self._ensure_shared(keys)
        known = {key: self._recalled(self._index[key]) for key in keys if key in self._index}
        computed = self._advance([key for key in keys if key not in known])
        self._evict()
        if len(computed) == 1 and computed[0].keys == keys:
            return computed[0].logits
        known.update(
            (key, block.logits[row]) for block in computed for row, key in enumerate(block.keys)
        )
        return mx.stack([known[key] for key in keys])

    def known(self, query: Query) -> int:
        """How many tokens of a context are known."""
        key = key_of(query)
        return query.length if key in self._index else max(1, self._source(key)[1]) - 1

    def branch(self, query: Query) -> tuple[Cache, int]:
        """A cache outside the store of what is known of a context without its last token, and how
        many tokens that is."""
        place, reused = self._source(key_of(query))
        if place is None:
            return self._runner.empty_cache(), 0
        place.block.used = self._tick
        if reused < len(place.key):
            branch = place.block.trimmed(place.row, reused - 1)
        else:
            branch = place.block.copied([place.row])
            branch.settle()
        return branch.cache, reused - 1

    def pin(self, query: Query) -> None:
        """Compute a context if necessary, and keep it until it is dropped."""
        key = key_of(query)
        if key not in self._index:
            self.logits([query])
        place = self._index.get(key)
        if place is not None and not place.block.pinned:
            pinned, *_ = self._replace(
                place.block, [[place.row], sorted(place.block.living - {place.row})]
            )
            pinned.pinned = True

    def drop(self, version: int) -> None:
        """Drop every row of an adapter."""
        for block in [
            block for block in self._blocks if any(key[0] == version for key in block.keys)
        ]:
            self._replace(
                block, [[row for row in sorted(block.living) if block.keys[row][0] != version]]
            )

    def clear(self) -> None:
        """Drop all rows."""
        self._blocks.clear()
        self._index = PrefixIndex()
        self._aside.clear()

    # --- the course of a call ---------------------------------------------------------------------

    def _ensure_shared(self, keys: Sequence[Key]) -> None:
        """Compute the long prefixes that several of ``keys`` share, shorter ones first."""
        left = self._branches([key for key in keys if key not in self._index])
        while left:
            first, longer = list[Key](), list[Key]()
            for prefix in left:  # sorted: those that begin with one come right behind it
                begins = first and prefix[: len(first[-1])] == first[-1]
                (longer if begins else first).append(prefix)
            self._advance(first)
            left = longer

    def _branches(self, keys: Sequence[Key]) -> list[Key]:
        """The prefixes that are worth their own pass: those that two or more keys lack, and those
        of known contexts that a key leaves, which may not be the last to do so."""
        known = {key: self._source(key)[1] for key in keys}
        ordered = sorted(key for key in keys if len(key) - known[key] >= WORTHWHILE)
        shared = {
            a[:size]
            for a, b in itertools.pairwise(ordered)
            if (size := common_length(a, b)) > max(known[a], known[b])
        }
        shared.update(
            key[:size]
            for key in ordered
            if known[key] < (size := self._index.nearest(key)[1]) < len(key)
        )
        worthwhile: list[Key] = []
        for prefix in sorted(shared):
            below = common_length(prefix, worthwhile[-1]) if worthwhile else 0
            if len(prefix) - max(below, self._source(prefix)[1]) >= WORTHWHILE:
                worthwhile.append(prefix)
        return [prefix for prefix in worthwhile if prefix not in self._index]

    def _advance(self, keys: Sequence[Key]) -> list[RowBlock]:
        """Compute ``keys``, and make their rows part of the store."""
        if not keys:
            return []
        waiting: dict[int, list[RowBlock]] = defaultdict(list)
        for block in self._started(keys):
            parts: dict[int, list[int]] = defaultdict(list)
            for row, tokens in enumerate(block.missing):
                parts[self._width_class(len(tokens))].append(row)
            for width, part in zip(parts, block.split([*parts.values()]), strict=True):
                waiting[width].append(part)
        fed = [block for blocks in waiting.values() for block in _packed(blocks)]
        for block in fed:
            if any(missing := block.missing):
                block.feed(self._runner, missing)
                block.costly = [len(tokens) + 1 >= WORTHWHILE for tokens in missing]
        finished = _packed(fed)
        for block in finished:
            block.step(self._runner)
            self._keep(block)
        return finished

    def _width_class(self, width: int) -> int:
        """Rows of one class are fed together: at most about half of it is padding."""
        return ((width + 7) // 8).bit_length() if self._ragged else width

    # --- where contexts start ---------------------------------------------------------------------

    def _source(self, key: Key) -> tuple[Place | None, int]:
        """The row that ``key`` can start from, and how many of its elements."""
        prefix = self._index.longest_prefix(key[:-1])
        whole = len(prefix) if prefix else 0
        near, common = self._index.nearest(key)
        common = min(common, len(key) - 1)
        if near and common >= whole + WORTHWHILE and self._index[near].block.trimmable:
            return self._index[near], common
        return (self._index[prefix], whole) if prefix else (None, 0)

    def _started(self, keys: Sequence[Key]) -> list[RowBlock]:
        """Every key in a block that holds a part of it, maybe none of it."""
        extended: dict[RowBlock, list[tuple[int, Key]]] = defaultdict(list)
        started, fresh = [], []
        for key in keys:
            place, reused = self._source(key)
            if place is None:
                fresh.append(key)
            elif reused < len(place.key):
                self._touch(place.block)
                started.append(place.block.trimmed(place.row, reused - 1).towards([key]))
            else:
                extended[place.block].append((place.row, key))
        for block, items in extended.items():
            # Sorted only by row: keys of the same row stay in the order asked.
            rows, targets = zip(*sorted(items, key=itemgetter(0)), strict=True)
            started.append(self._moved_on(block, rows, needed=extended).towards(targets))
        if fresh:
            versions = [key[0] for key in fresh]
            started.append(RowBlock.empty(self._runner, versions).towards(fresh))
        return started

    def _moved_on(
        self, block: RowBlock, rows: Sequence[int], needed: Collection[RowBlock]
    ) -> RowBlock:
        """Take the rows that are extended out of their block and leave the others. ``needed``
        blocks are used in this call."""
        if block.pinned or (any(block.costly) and not block.stays_trimmable):
            self._touch(block)
            return block.copied(rows)
        staying = sorted(block.living.difference(rows))
        if len(staying) >= STAYS_WHOLE * len(block.keys):
            for row in block.living.intersection(rows):
                self._index.remove(block.keys[row])
            block.living = set(staying)
            self._evict(needed, left=block)
            return block.copied(rows) if block in self._blocks else block.split([rows])[0]
        self._forget(block)
        moved, *left = block.split([rows, staying] if staying else [rows])
        for rest in left:
            self._keep(rest)
            rest.used = block.used
        return moved

    # --- keeping ----------------------------------------------------------------------------------

    def _keep(self, block: RowBlock) -> None:
        broken = mx.isnan(block.logits[:, 0]).tolist()  # such state gives nan to all that follows
        block.used = self._tick
        block.living = {row for row, bad in enumerate(broken) if not bad}
        if block.living:
            self._blocks.append(block)
        for row in sorted(block.living):
            self._index.add(block.keys[row], Place(block, row))

    def _forget(self, block: RowBlock) -> None:
        self._blocks.remove(block)
        for row in block.living:
            self._index.remove(block.keys[row])

    def _replace(self, block: RowBlock, parts: Sequence[Sequence[int]]) -> list[RowBlock]:
        """Split a block of the store; empty parts give no block."""
        self._forget(block)
        blocks = block.split([part for part in parts if part])
        for split in blocks:
            self._keep(split)
            split.used, split.pinned = block.used, block.pinned
        return blocks

    def _touch(self, block: RowBlock) -> None:
        """Note that contexts start from a block: it is dropped after those from which none does,
        but does not count as rows of this call."""
        block.used = max(block.used, self._tick - 1)

    def _recalled(self, place: Place) -> mx.array:
        place.block.used = self._tick
        return place.block.logits[place.row]

    def _evict(self, needed: Collection[RowBlock] = (), left: RowBlock | None = None) -> None:
        """Forget the least recently used blocks beyond the limit.

        Args:
            needed: Blocks whose rows this call still takes.
            left: One of them that is no longer needed after its rows are copied.
        """
        in_hand = [
            block
            for block in self._blocks
            if block.used == self._tick or block.pinned or block in needed
        ]
        aside = [block for block in self._blocks if block is left or block not in in_hand]
        excess = _nbytes(aside) - self._aside.limit(_nbytes(in_hand))
        for block in sorted(aside, key=attrgetter("used")):
            if excess > 0:
                excess -= block.nbytes
                self._forget(block)


def _nbytes(blocks: Iterable[RowBlock]) -> int:
    return sum(block.nbytes for block in blocks)


def _packed(blocks: Sequence[RowBlock]) -> list[RowBlock]:
    """Join blocks, the longest first, as long as padding is not more than half of the result."""
    packed: list[list[RowBlock]] = []
    for block in sorted(blocks, key=lambda block: -block.length):
        if packed and _dense([*packed[-1], block]):
            packed[-1].append(block)
        else:
            packed.append([block])
    return [first.joined(others) for first, *others in packed]


def _dense(blocks: Sequence[RowBlock]) -> bool:
    lengths = [len(key) for block in blocks for key in block.keys]
    padding = max(lengths) * len(lengths) - sum(lengths)
    return padding <= max(TOLERATED_PADDING, sum(lengths))
