"""The store: contexts of models with attention alone, computed where the planner places them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from mlx_lm.models.cache import RotatingKVCache

import mlx.core as mx
from genlm.core import Query
from genlm.kit.kv import Placement, Planner, SharingCosts, TokenSequence
from genlm.kit.segments import Slot
from genlm.mlx.chunk import Chunk
from genlm.mlx.layout import Layout
from genlm.mlx.runner import MAX_READ_TOKENS, MIN_READ_TOKENS, Cache, Runner, in_order, ordered
from genlm.mlx.table import Table

#: The costs with which the planner decides on sharing.
SHARING_COSTS = SharingCosts(sharing=512, waste=2.0)

#: Up to this many tokens of each context before its last token are computed together with it. If
#: there are more, they are computed first, without their logits.
MAX_TOKENS_BEFORE_LAST = 4

#: The most products of queries and keys for each head in one forward pass of a long context, and
#: the number of tokens that a forward pass may have in any case.
MAX_PRODUCTS, MIN_FED_TOKENS = 1 << 21, 256


class Store:
    """Evaluates contexts, each from its longest known prefix on. A
    :class:`~genlm.kit.kv.planner.Planner` decides where, and the table moves the state.

    Args:
        runner: The model.
        max_bytes: The most bytes to keep besides the current batch and pinned contexts; the least
            recently used are dropped first. For ``None`` see
            :class:`~genlm.mlx.cache_limit.CacheLimit`.
        costs: The costs with which the planner decides on sharing.
        on_close: Undoes the changes of the model that this store needs.

    Attributes:
        planner: Decides where contexts are computed, and what is kept.
    """

    def __init__(
        self,
        runner: Runner,
        max_bytes: int | None,
        costs: SharingCosts = SHARING_COSTS,
        on_close: Callable[[], Any] = lambda: None,
    ) -> None:
        self._runner = runner
        self._on_close = on_close
        self._table = Table(runner, max_bytes)
        self.planner: Planner[TokenSequence] = Planner(self._table, costs)

    def __len__(self) -> int:
        return len(self.planner.tree.kept)

    @property
    def nbytes(self) -> int:
        return self.planner.tree.positions * self._table.position_bytes

    # --- what the engine asks for -----------------------------------------------------------------

    def logits(self, queries: Sequence[Query]) -> mx.array:
        """The logits of the next token of each of the distinct ``queries``, ``[len(queries),
        vocab_size]`` float32."""
        return in_order([*self.results([_sequence(query) for query in queries])])

    def results(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[list[int], mx.array]]:
        """The wanted rows of distinct sequences, as they are computed. Yields the sequence of each
        row, and logits, ``[n, vocab_size]`` float32. The rows of one sequence come in order."""
        done = self._table.in_hand = 0
        for batch in self.planner.batches(sequences):
            result = self._computed(batch)
            yield result
            done += sum(len(one.indices()) for one in batch)
            if done < len(sequences):
                self._table.in_hand += self._positions_of(batch)

    def known(self, query: Query) -> int:
        """How many tokens of a context, without its last, are known."""
        return self.planner.known(_sequence(query))

    def branch(self, query: Query) -> tuple[Cache, int]:
        """A cache outside the store that holds the known prefix of a context without its last
        token, and the length of this prefix."""
        context, tree = _sequence(query), self.planner.tree
        found, common = tree.nearest(context.key)
        cache, known = self._runner.empty_cache(), min(common, context.latest_start)
        if found is not None and known:
            tree.touch(found)
            for layer, (keys, values) in zip(cache, self._table.read(found, known), strict=True):
                # The cache may hold more than its window.
                rotates = isinstance(layer, RotatingKVCache)
                more = (layer.keep, layer.max_size, known) if rotates else ()
                layer.state = keys, values, known, *more
        return cache, known

    def pin(self, query: Query) -> bool:
        """Compute a context if necessary, and keep it until it is dropped; ``False`` if its row is
        NaN, so that its state is not kept."""
        if self.planner.pin(_sequence(query)):
            return True
        logits = self.logits([query])
        self.planner.pin(_sequence(query))
        return not bool(mx.isnan(logits[0, 0]))

    def drop(self, version: int) -> None:
        """Drop all state of an adapter."""
        self.planner.drop_adapter(version)

    def clear(self) -> None:
        """Drop everything."""
        self.planner.clear()

    def close(self) -> None:
        """Drop everything, and leave mlx-lm as it was."""
        self.clear()
        self._on_close()

    # --- the course of a call ---------------------------------------------------------------------

    def _computed(self, batch: Sequence[Placement[TokenSequence]]) -> tuple[list[int], mx.array]:
        """Compute a batch, and keep its state. Returns the index of each row's sequence, and
        logits."""
        try:
            owners, logits = self._compute(batch)
            # State with NaN must not stay: a masked column still takes part in products.
            flags = mx.isnan(logits[:, 0]).tolist()
        except BaseException:
            self.planner.abandon()  # at once, since later commands of the table would fail too
            raise
        broken = {owner for owner, flag in zip(owners, flags, strict=True) if flag}
        self.planner.commit([one for one in batch if broken.isdisjoint(one.indices())])
        return owners, logits

    def _positions_of(self, batch: Sequence[Placement[TokenSequence]]) -> int:
        """How many positions the computed contexts take."""
        tree = self.planner.tree
        ends = {one.end for one in batch}
        return sum(
            tree.columns if isinstance(one, Slot) else one.size for one in tree.with_paths(ends)
        )

    def _compute(self, batch: Sequence[Placement[TokenSequence]]) -> tuple[list[int], mx.array]:
        wanted = [one.rows() for one in batch]
        starts = [one.start for one in batch]
        first = [min(at for _, at in rows) for rows in wanted]
        more = sum(first) - sum(starts)
        if more > min(MAX_TOKENS_BEFORE_LAST * len(batch), self._runner.step_size - len(batch)):
            bounds = zip(batch, starts, first, strict=True)
            self._feed(chunk for bound in bounds for chunk in _chunks(*bound))
            starts = first
        most = max(MAX_READ_TOKENS, MIN_READ_TOKENS * len(batch))
        owners: list[int] = []
        parts: list[mx.array] = []
        for pieces in _forwards(batch, starts, most):
            rows = [
                (number, index, chunk.start + len(chunk.tokens) - 1 - at)
                for number, (chunk, one) in enumerate(pieces)
                for index, at in wanted[one]
                if chunk.start <= at < chunk.start + len(chunk.tokens)
            ]
            logits = self._run([chunk for chunk, _ in pieces], [(n, back) for n, _, back in rows])
            owners += [index for _, index, _ in rows]
            parts += [logits] if rows else []
        return owners, parts[0] if len(parts) == 1 else mx.concatenate(parts)

    def _feed(self, chunks: Iterable[Chunk]) -> None:
        """Compute chunks in order, with as many tokens at a time as one forward pass may have."""
        batch: list[Chunk] = []
        room = self._runner.step_size
        for segment, start, tokens, version in chunks:
            while tokens:
                most = min(room, max(MIN_FED_TOKENS, MAX_PRODUCTS // (start + room)))
                some, tokens = tokens[:most], tokens[most:]
                batch.append(Chunk(segment, start, some, version))
                start, room = start + len(some), room - len(some)
                if room == 0 or tokens:  # a forward pass has one chunk of a segment
                    self._run(batch)
                    batch, room = [], self._runner.step_size
        if batch:
            self._run(batch)

    def _run(self, chunks: Sequence[Chunk], wanted: Sequence[tuple[int, int]] = ()) -> mx.array:
        """Compute chunks, and return the logits after the ``wanted`` tokens, ``[len(wanted),
        vocab_size]`` float32. A wanted token is given by its chunk and its distance from the
        chunk's last token."""
        self._table.layout = layout = Layout(chunks)
        try:
            logits = self._runner.one_by_one(self._table.layers, layout.versions, layout.tokens)
        finally:
            del self._table.layout
        places = [int(layout.last[number]) - back for number, back in wanted]
        rows = ordered(logits, np.array(places, dtype=int)).astype(mx.float32)
        # If no token is wanted, the computation after the last layer's keys and values is skipped.
        mx.eval(rows if wanted else (), [trunk.layers for trunk in layout.trunks])
        self._table.evaluate()
        return rows


def _sequence(query: Query) -> TokenSequence:
    return TokenSequence(query.context, query.adapter)


def _chunks(one: Placement[TokenSequence], start: int, stop: int) -> list[Chunk]:
    """The positions from ``start`` to ``stop`` as chunks, one for each segment."""
    sequence = one.sequence
    return [
        Chunk(segment, first, sequence.tokens.since(first)[: last - first], sequence.version)
        for segment, first, last in one.segments(start, stop)
    ]


def _forwards(
    batch: Sequence[Placement[TokenSequence]], starts: Sequence[int], most: int
) -> Iterator[list[tuple[Chunk, int]]]:
    """Divide the tokens from ``starts`` on into forward passes of at most ``most`` tokens, with one
    chunk of each segment. Yields chunks, each with the index of its placement in the batch."""
    pieces: list[tuple[Chunk, int]] = []
    room = most
    for number, (one, start) in enumerate(zip(batch, starts, strict=True)):
        for segment, at, tokens, version in _chunks(one, start, one.sequence.length):
            while tokens:
                some, tokens = tokens[:room], tokens[room:]
                pieces.append((Chunk(segment, at, some, version), number))
                at, room = at + len(some), room - len(some)
                if room == 0:
                    yield pieces
                    pieces, room = [], most
    if pieces:
        yield pieces
