"""Groups of tokens whose attention is computed together, and the trunks below them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen

import mlx.core as mx
from genlm.kit.segments import Trunk
from genlm.mlx.attention import Partial
from genlm.mlx.chunk import Chunk, LayerState

#: Added to the logit of a masked position if all positions of a part may be masked. Not infinity:
#: then the part would have no finite maximum.
FAR_BELOW = -1e30


@frozen(eq=False)
class Below:
    """A trunk that some tokens of a group stand on.

    Attributes:
        trunk: The trunk.
        size: How many of its positions belong to their contexts.
        positions: The position of each of these tokens.
        tokens: Which tokens of the group; ``None`` is all.
    """

    trunk: Trunk
    size: int
    positions: np.ndarray
    tokens: mx.array | None

    def is_within(self, window: int | None) -> bool:
        """Whether any token attends to a position of the trunk."""
        last = self.trunk.start + self.size - 1
        return window is None or bool(self.positions.min() - last < window)

    def partial(self, queries: mx.array, layer: int, window: int | None) -> Partial:
        """The attention of the group's scaled queries, ``[tokens, heads, dim]``: all in one product
        for each head of the keys."""
        keys, values = (state[0, :, : self.size] for state in self.trunk.layers[layer])
        if self.tokens is not None:
            queries = queries[self.tokens]
        count, heads, dim = queries.shape
        kv_heads = keys.shape[0]
        grouped = queries.reshape(count, kv_heads, -1, dim).transpose(1, 0, 2, 3)
        mask = self._mask(window, heads // kv_heads)
        found = Partial.of(grouped.reshape(kv_heads, -1, dim), keys, values, mask)
        return found.map(
            lambda part: (
                part.reshape(kv_heads, count, -1, part.shape[-1])
                .transpose(1, 0, 2, 3)
                .reshape(count, heads, -1)
            )
        )

    def _mask(self, window: int | None, repeats: int) -> mx.array | None:
        start = self.trunk.start
        if window is None or self.positions.max() - start < window:
            return None
        seen = np.arange(start, start + self.size) > self.positions[:, None] - window
        mask = np.where(seen, 0, FAR_BELOW).astype(np.float32)
        return mx.array(np.repeat(mask, repeats, axis=0))


@define(eq=False)
class Group:
    """Tokens whose attention is computed together.

    Attributes:
        tokens: Which tokens of the forward pass.
        below: The trunks that they stand on.
    """

    tokens: slice
    below: list[Below]

    def attend(
        self, queries: mx.array, state: LayerState, layer: int, scale: float, window: int | None
    ) -> mx.array:
        """Attention of ``[tokens, heads, 1, dim]`` queries."""
        below = [each for each in self.below if each.is_within(window)]
        if not below:
            return self.plain(queries, self.own(state, layer), scale, window)
        queries = queries * scale
        found = self.partial(queries, self.own(state, layer), window)
        for each in below:
            found = found.merged(each.partial(queries[:, :, 0], layer, window), each.tokens)
        return found.output[:, :, None].astype(queries.dtype)

    def own(self, state: LayerState, layer: int) -> LayerState:
        """The tokens' own keys and values, without trunks."""
        raise NotImplementedError

    def plain(
        self, queries: mx.array, own: LayerState, scale: float, window: int | None
    ) -> mx.array:
        """Attention only to these."""
        raise NotImplementedError

    def partial(self, queries: mx.array, own: LayerState, window: int | None) -> Partial:
        """The same with scaled queries, ``[tokens, heads, dim]``, to be merged."""
        raise NotImplementedError


@define(eq=False)
class TrunkGroup(Group):
    """The tokens of a trunk that is being computed."""

    chunk: Chunk
    _masks: dict[int | None, np.ndarray] = field(factory=dict, init=False)

    def own(self, state: LayerState, layer: int) -> LayerState:
        trunk, stop = self.chunk.segment, self.chunk.columns.stop
        assert isinstance(trunk, Trunk)
        keys, values = trunk.layers[layer]
        return keys[:, :, :stop], values[:, :, :stop]

    def plain(
        self, queries: mx.array, own: LayerState, scale: float, window: int | None
    ) -> mx.array:
        cut = window is not None and window < self.chunk.columns.stop
        found = mx.fast.scaled_dot_product_attention(
            queries.transpose(2, 1, 0, 3),
            *own,
            scale=scale,
            mask=mx.array(self._mask(window)) if cut else "causal",
        )
        return found.transpose(2, 1, 0, 3)

    def partial(self, queries: mx.array, own: LayerState, window: int | None) -> Partial:
        keys, values = own
        count, heads, _, dim = queries.shape
        kv_heads = keys.shape[1]
        grouped = queries.transpose(2, 1, 0, 3).reshape(1, kv_heads, -1, dim)
        added = np.where(self._mask(window), 0, -np.inf).astype(np.float32)
        mask = mx.array(np.tile(added, (heads // kv_heads, 1)))
        found = Partial.of(grouped, keys, values, mask)
        return found.map(lambda part: part.reshape(heads, count, part.shape[-1]).transpose(1, 0, 2))

    def _mask(self, window: int | None) -> np.ndarray:
        """Which columns each token reads."""
        if window not in self._masks:
            own = self.chunk.columns
            self._masks[window] = _readable(np.array(own), own.stop, window)
        return self._masks[window]


@define(eq=False)
class RowGroup(Group):
    """New tokens of rows of the table, padded to the same number.

    Attributes:
        slots: The rows: a slice of the table, or an array of them.
        columns: How many columns are read.
        grid: The token at each place, ``[rows * width]``, and the place of each token; ``None`` if
            they are the same.
        last: The last column that each place reads, ``[rows, width]``.
    """

    slots: slice | mx.array
    columns: int
    width: int
    grid: tuple[mx.array, mx.array] | None
    last: np.ndarray
    _masks: dict[Any, mx.array | None] = field(factory=dict, init=False)

    def own(self, state: LayerState, layer: int) -> LayerState:
        keys, values = (each[:, :, : self.columns] for each in state)
        return keys[self.slots], values[self.slots]

    def plain(
        self, queries: mx.array, own: LayerState, scale: float, window: int | None
    ) -> mx.array:
        _, heads, _, dim = queries.shape
        queries = self._placed(queries).reshape(-1, self.width, heads, dim)
        found = mx.fast.scaled_dot_product_attention(
            queries.swapaxes(1, 2), *own, scale=scale, mask=self._mask(window)
        )
        return self._taken(found.swapaxes(1, 2).reshape(-1, heads, 1, found.shape[-1]))

    def partial(self, queries: mx.array, own: LayerState, window: int | None) -> Partial:
        keys, values = own
        _, heads, _, dim = queries.shape
        kv_heads = keys.shape[1]
        repeats = heads // kv_heads
        queries = self._placed(queries).reshape(-1, self.width, kv_heads, repeats, dim)
        grouped = queries.transpose(0, 2, 3, 1, 4).reshape(-1, kv_heads, repeats * self.width, dim)
        found = Partial.of(grouped, keys, values, self._mask(window, repeats))
        return found.map(
            lambda part: self._taken(
                part.reshape(-1, kv_heads, repeats, self.width, part.shape[-1])
                .transpose(0, 3, 1, 2, 4)
                .reshape(-1, heads, part.shape[-1])
            )
        )

    def _placed(self, tokens: mx.array) -> mx.array:
        return tokens if self.grid is None else tokens[self.grid[0]]

    def _taken(self, places: mx.array) -> mx.array:
        return places if self.grid is None else places[self.grid[1]]

    def _mask(self, window: int | None, repeats: int = 0) -> mx.array | None:
        """The mask for MLX's kernel, or a mask to add, with ``repeats`` heads of queries to each of
        keys; ``None`` if every place reads all columns."""
        kind = window, repeats
        if kind not in self._masks:
            mask = _readable(self.last, self.columns, window)[:, None]
            if repeats:
                added = np.where(mask, 0, -np.inf).astype(np.float32)
                self._masks[kind] = mx.array(np.tile(added, (1, 1, repeats, 1)))
            else:
                self._masks[kind] = mx.array(mask)
            if mask.all():
                self._masks[kind] = None
        return self._masks[kind]


def below_of(chunks: Sequence[Chunk]) -> list[Below]:
    """The trunks below tokens, each with its tokens."""
    found: dict[tuple[Trunk, int], list[range]] = defaultdict(list)
    start = 0
    for chunk in chunks:
        tokens = range(start, start + len(chunk.tokens))
        for trunk, size in chunk.segment.path():
            found[trunk, size].append(tokens)
        start = tokens.stop
    if not found:
        return []
    positions = np.concatenate([np.arange(chunk.start, chunk.stop) for chunk in chunks])
    below = []
    for (trunk, size), ranges in found.items():
        mine = np.concatenate(ranges)
        some = None if len(mine) == start else mx.array(mine, mx.int32)
        below.append(Below(trunk, size, positions[mine], some))
    return below


def row_group(tokens: slice, chunks: Sequence[Chunk]) -> RowGroup:
    slots = [chunk.slot for chunk in chunks]
    widths = [len(chunk.tokens) for chunk in chunks]
    first = [chunk.start - chunk.segment.start for chunk in chunks]  # of the columns that they take
    width, columns = max(widths), max(map(operator.add, first, widths))
    span = slots[-1] - slots[0] + 1
    # If few other rows lie between the wanted ones, read them too; else copy the wanted ones.
    whole = span <= 2 * len(slots)
    lines = [slot - slots[0] for slot in slots] if whole else list(range(len(slots)))
    count = span if whole else len(slots)
    taken = slice(slots[0], slots[-1] + 1) if whole else mx.array(slots, mx.int32)
    # Of each token: its chunk, and its place in that.
    owner = np.repeat(np.arange(len(chunks)), widths)
    own = np.arange(len(owner)) - np.repeat(np.cumsum(widths) - widths, widths)
    places = np.array(lines)[owner] * width + own
    grid = np.zeros(count * width, np.int32)
    grid[places] = np.arange(len(places))
    last = np.zeros(count * width, np.int32)
    last[places] = np.array(first)[owner] + own
    return RowGroup(
        tokens,
        below_of(chunks),
        taken,
        columns,
        width,
        None
        if np.array_equal(places, np.arange(count * width))
        else (mx.array(grid), mx.array(places, mx.int32)),
        last.reshape(count, width),
    )


def _readable(last: np.ndarray, columns: int, window: int | None) -> np.ndarray:
    """Which of ``columns`` columns each place reads, up to its own: ``[..., columns]`` booleans."""
    each = np.arange(columns)
    seen = each <= last[..., None]
    return seen if window is None else seen & (each > last[..., None] - window)
