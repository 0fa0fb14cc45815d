"""The store: contexts with plain attention, computed where the core's planner places them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import mlx.core as mx
from genlm.kit.kv import Placement, Planner, TokenSequence, Worth
from genlm.kit.segments import Row, Segment, Trunk
from genlm.mlx.block import RowBlock
from genlm.mlx.chunk import Chunk
from genlm.mlx.layout import Layout
from genlm.mlx.runner import Key, Runner
from genlm.mlx.table import Table

#: The numbers for decisions on sharing.
WORTH = Worth(sharing=512, waste=2.0)

#: Up to this many tokens before the last of a context are computed together with it. More are
#: computed first, without their logits.
FEW_MORE = 4

#: The most products of queries and keys for each head in one forward pass of a long context, unless
#: it would have fewer tokens than this.
MOST_PRODUCTS, LEAST_FED = 1 << 21, 256


class VersionedSequence(TokenSequence):
    """A sequence whose last row is wanted.

    Args:
        name: The version of its adapter, then its tokens.
    """

    def __init__(self, name: Key) -> None:
        super().__init__(name[1:])
        self.name, self.version = name, name[0]

    def chunk(self, segment: Segment, start: int, stop: int) -> Chunk:
        """The tokens of some positions, for a segment."""
        return Chunk(segment, start, self.name[start + 1 : stop + 1], self.name[0])


class Store:
    """Evaluates contexts, each starting from the longest part of it that is known: a
    :class:`~genlm.kit.kv.planner.Planner` says where, and the table moves the state.

    Args:
        runner: The model.
        max_bytes: The most bytes to keep besides the current batch and pinned contexts; the least
            recently used are dropped first. For ``None`` see :class:`~genlm.mlx.aside.Aside`.
        worth: The numbers for decisions on sharing.
    """

    def __init__(self, runner: Runner, max_bytes: int | None, worth: Worth = WORTH) -> None:
        self._runner = runner
        self._table = Table(runner, max_bytes)
        self._planner: Planner[VersionedSequence] = Planner(self._table, worth)

    def __len__(self) -> int:
        return len(self._planner.tree.kept)

    @property
    def nbytes(self) -> int:
        return self._planner.tree.positions * self._table.position_bytes

    # --- what the engine asks for -----------------------------------------------------------------

    def logits(self, keys: Sequence[Key]) -> mx.array:
        """The logits of the next token of each of the distinct ``keys``, ``[len(keys),
        vocab_size]`` float32."""
        order: list[int] = []
        parts: list[mx.array] = []
        self._table.in_hand = 0
        for batch in self._planner.batches([VersionedSequence(key) for key in keys]):
            parts.append(self._computed(batch))
            self._table.in_hand += self._positions_of(batch)
            order += [one.index for one in batch]
        logits = parts[0] if len(parts) == 1 else mx.concatenate(parts)
        return _ordered(logits, sorted(range(len(order)), key=order.__getitem__))

    def known(self, key: Key) -> int:
        """How many elements of ``key`` without its last token are known: at least its adapter's
        version."""
        return self._planner.known(VersionedSequence(key)) + 1

    def branch(self, key: Key) -> RowBlock:
        """A block of one row, outside the store: the known part of ``key`` without its last
        token."""
        context, tree = VersionedSequence(key), self._planner.tree
        found, common = tree.nearest(context.key)
        cache, known = self._runner.empty_cache(), min(common, context.latest_start)
        if found is not None and known:
            tree.touch(found)
            for layer, (keys, values) in zip(cache, self._table.read(found, known), strict=True):
                layer.state = keys, values, known
        return RowBlock([key[: known + 1]], cache)

    def pin(self, key: Key) -> None:
        """Compute ``key`` if necessary, and keep it until it is dropped."""
        if not self._planner.pin(VersionedSequence(key)):
            self.logits([key])
            self._planner.pin(VersionedSequence(key))

    def drop(self, version: int) -> None:
        """Drop all state of an adapter."""
        self._planner.drop_adapter(version)

    def clear(self) -> None:
        """Drop everything."""
        self._planner.clear()

    def check_integrity(self) -> None:
        """Raises: RuntimeError: rows, free rows and the tree do not add up."""
        self._planner.tree.check_integrity()

    # --- the course of a call ---------------------------------------------------------------------

    def _computed(self, batch: Sequence[Placement[VersionedSequence]]) -> mx.array:
        """The logits of a batch, whose state is kept."""
        try:
            logits = self._compute(batch)
            # State with nan must not stay: a masked column still takes part in products.
            broken = mx.isnan(logits[:, 0]).tolist()
        except BaseException:
            self._planner.abandon()  # now: a later command of the table would fail, too
            raise
        self._planner.commit([one for one, bad in zip(batch, broken, strict=True) if not bad])
        return logits

    def _positions_of(self, batch: Sequence[Placement[VersionedSequence]]) -> int:
        """How many positions the computed contexts take."""
        tree = self._planner.tree
        ends = {one.end for one in batch}
        return sum(
            tree.columns if isinstance(one, Row) else one.size for one in tree.with_paths(ends)
        )

    def _compute(self, batch: Sequence[Placement[VersionedSequence]]) -> mx.array:
        starts = [one.start for one in batch]
        last = [one.sequence.latest_start for one in batch]
        more = sum(last) - sum(starts)
        if more > min(FEW_MORE * len(batch), self._runner.step_size - len(batch)):
            bounds = zip(batch, starts, last, strict=True)
            self._feed(chunk for bound in bounds for chunk in _chunks(*bound))
            starts = last
        bounds = zip(batch, starts, [one.sequence.length for one in batch], strict=True)
        chunks = [_chunks(*bound) for bound in bounds]
        layout = Layout([chunk for some in chunks for chunk in some])
        logits = self._forward(layout)
        places = dict(zip(map(id, layout.chunks), layout.last, strict=True))
        logits = _ordered(logits, [places[id(some[-1])] for some in chunks]).astype(mx.float32)
        self._evaluate(layout, logits)
        return logits

    def _feed(self, chunks: Iterable[Chunk]) -> None:
        """Compute chunks in order, with as many tokens at a time as one forward pass may have."""
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


def _chunks(one: Placement[VersionedSequence], start: int, stop: int) -> list[Chunk]:
    return [one.sequence.chunk(*part) for part in one.segments(start, stop)]


def _ordered(rows: mx.array, order: list[int]) -> mx.array:
    return rows if order == list(range(len(rows))) else rows[mx.array(order, mx.int32)]
