"""Groups of tokens whose attention is computed together, and the positions that they attend to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

import mlx.core as mx
from genlm.kit.segments import Trunk
from genlm.mlx.attention import Partial
from genlm.mlx.chunk import Chunk, LayerState

#: Added to the logit of a masked position. With minus infinity, a part in which all positions are
#: masked would have no finite maximum.
MASKED_LOGIT = -1e30


@frozen(eq=False)
class Part:
    """Positions that tokens of a group attend to: in slots of the table, or in a trunk. The tokens
    lie in a grid with a line for each slot, padded to equal length.

    Attributes:
        trunk: The trunk; ``None`` means the table.
        slots: The slots that are read, one for each line: a slice, or an array of them.
        columns: How many columns are read.
        last: The last column that each place of the grid may read, ``[lines, width]``.
        tokens: The token of the group at each place of the grid; ``None`` if both are in the same
            order.
        places: The place of each token in the grid; ``None`` if both are in the same order.
    """

    trunk: Trunk | None
    slots: slice | mx.array
    columns: int
    last: np.ndarray
    tokens: mx.array | None
    places: mx.array | None = None
    _masks: dict[tuple[int | None, int], mx.array | None] = field(factory=dict, init=False)

    def first(self, window: int | None) -> int:
        """The first column that any token attends to."""
        return 0 if window is None else max(0, int(self.last.min()) - window + 1)

    def state(self, table: LayerState, layer: int) -> LayerState:
        """The keys and values of the table, or of the trunk."""
        state: LayerState = table if self.trunk is None else self.trunk.layers[layer]
        return state

    def attend(
        self,
        queries: mx.array,
        table: LayerState,
        layer: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of ``[tokens, heads, 1, dim]`` queries to this part alone."""
        _, heads, _, dim = queries.shape
        queries = self._placed(queries).reshape(-1, self.last.shape[1], heads, dim)
        keys, values = self._read(table, layer, window)
        found = mx.fast.scaled_dot_product_attention(
            queries.swapaxes(1, 2), keys, values, scale=scale, mask=self._mask(window), sinks=sinks
        )
        return self._taken(found.swapaxes(1, 2).reshape(-1, heads, 1, found.shape[-1]))

    def partial(
        self, queries: mx.array, table: LayerState, layer: int, window: int | None
    ) -> Partial:
        """Attention of scaled ``[tokens, heads, dim]`` queries to this part, in a form that can be
        merged with other parts."""
        keys, values = self._read(table, layer, window)
        _, heads, dim = queries.shape
        kv_heads, width = keys.shape[1], self.last.shape[1]
        repeats = heads // kv_heads
        queries = self._placed(queries).reshape(-1, width, kv_heads, repeats, dim)
        grouped = queries.transpose(0, 2, 3, 1, 4).reshape(-1, kv_heads, repeats * width, dim)
        found = Partial.of(grouped, keys, values, self._mask(window, repeats))
        return found.map(
            lambda part: self._taken(
                part.reshape(-1, kv_heads, repeats, width, part.shape[-1])
                .transpose(0, 3, 1, 2, 4)
                .reshape(-1, heads, part.shape[-1])
            )
        )

    def _read(self, table: LayerState, layer: int, window: int | None) -> LayerState:
        keys, values = self.state(table, layer)
        some = slice(self.first(window), self.columns)
        return keys[:, :, some][self.slots], values[:, :, some][self.slots]

    def _placed(self, tokens: mx.array) -> mx.array:
        return tokens if self.tokens is None else tokens[self.tokens]

    def _taken(self, places: mx.array) -> mx.array:
        return places if self.places is None else places[self.places]

    def _mask(self, window: int | None, repeats: int = 0) -> Any:
        """The mask for MLX's kernel or, with ``repeats`` query heads for each key head, an additive
        mask. ``None`` if every place reads all columns."""
        if not repeats and len(self.last) == 1 and (window is None or window >= self.columns):
            return "causal"  # the last token is in the last column
        if (window, repeats) not in self._masks:
            column = np.arange(self.first(window), self.columns)
            last = self.last[:, None, :, None]
            seen = column <= last
            if window is not None:
                seen &= column > last - window
            mask = None if seen.all() else mx.array(seen)
            if repeats and mask is not None:
                added = np.where(seen, 0, MASKED_LOGIT).astype(np.float32)
                mask = mx.array(np.tile(added, (1, 1, repeats, 1)))
            self._masks[window, repeats] = mask
        return self._masks[window, repeats]


@frozen(eq=False)
class Group:
    """New tokens of a trunk, or of slots of the table, whose attention is computed together.

    Attributes:
        tokens: The group's tokens among those of the forward pass.
        positions: The position of each token.
        into: The slots and columns into which the tokens are written: a rectangle if both are
            slices, otherwise a slot and a column for every token.
        own: The positions of the slots, or of the trunk.
        below: The positions of trunks that come before some of the tokens.
    """

    tokens: slice
    positions: np.ndarray
    into: tuple[Any, Any]
    own: Part
    below: list[Part]

    @classmethod
    def of(
        cls, start: int, chunks: Sequence[Chunk], widths: np.ndarray, indices: np.ndarray
    ) -> Group:
        """A group of the chunk of one trunk, or of chunks of slots in the order of the table.

        Args:
            start: The place of the first token in the forward pass.
            chunks: The chunks.
            widths: How many tokens each chunk has.
            indices: The slot of each chunk: in the table, or in the trunk, which has only one.
        """
        segment = chunks[0].segment
        # For each token: its chunk, its index in the chunk, its position and its column.
        owner = np.repeat(np.arange(len(chunks)), widths)
        nth = np.arange(len(owner)) - np.repeat(np.cumsum(widths) - widths, widths)
        positions = nth + np.repeat([chunk.start for chunk in chunks], widths)
        column = positions - np.repeat([chunk.segment.start for chunk in chunks], widths)
        first, width, columns = int(indices[0]), int(widths.max()), int(column.max()) + 1
        span = int(indices[-1]) - first + 1
        slots: slice | mx.array = slice(first, first + span)
        into: tuple[Any, Any] = slots, slice(columns - width, columns)
        if span * width != len(owner) or np.ptp(column[nth == 0]):
            into = mx.array(indices[owner], mx.int32), mx.array(column, mx.int32)
        lines = indices - first
        # If most slots in the span are wanted, all of them are read, without a copy.
        if span > 2 * len(indices):
            lines, slots = np.arange(len(indices)), mx.array(indices, mx.int32)
        size = (int(lines[-1]) + 1) * width
        places = lines[owner] * width + nth
        tokens, last = np.zeros(size, np.int32), np.full(size, columns - 1)
        tokens[places], last[places] = np.arange(len(owner)), column
        full = size == len(owner)
        own = Part(
            trunk=segment if isinstance(segment, Trunk) else None,
            slots=slots,
            columns=columns,
            last=last.reshape(-1, width),
            tokens=None if full else mx.array(tokens),
            places=None if full else mx.array(places, mx.int32),
        )
        below = below_of(chunks, owner, positions)
        return cls(slice(start, start + len(owner)), positions, into, own, below)

    def write(self, table: LayerState, layer: int, new: LayerState) -> None:
        """Write the group's share of the new keys and values into the slots or the trunk."""
        slots, columns = self.into
        for state, more in zip(self.own.state(table, layer), new, strict=True):
            mine = more[self.tokens, :, 0]
            if isinstance(columns, slice):
                lines = mine.reshape(-1, self.own.last.shape[1], *mine.shape[1:])
                mine = lines.swapaxes(1, 2)
            state[slots, :, columns] = mine

    def attend(
        self,
        queries: mx.array,
        table: LayerState,
        layer: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of the group's share of all queries, ``[tokens, heads, 1, dim]``."""
        queries = queries[self.tokens]
        below = [part for part in self.below if part.first(window) < part.columns]
        if not below:
            return self.own.attend(queries, table, layer, scale, window, sinks)
        queries = queries[:, :, 0] * scale
        found = self.own.partial(queries, table, layer, window)
        for part in below:
            found = found.merged(part.partial(queries, table, layer, window), part.tokens)
        return found.sunk(sinks).output[:, :, None].astype(queries.dtype)


def below_of(chunks: Sequence[Chunk], owner: np.ndarray, positions: np.ndarray) -> list[Part]:
    """The trunks below the tokens of chunks. ``owner`` and ``positions`` are the chunk and the
    position of each token."""
    above: dict[tuple[Trunk, int], list[int]] = defaultdict(list)
    for at, chunk in enumerate(chunks):
        if chunk.segment.parent is not None:
            for below in chunk.segment.path():
                above[below].append(at)
    found = []
    for (trunk, size), those in above.items():
        stands = np.zeros(len(chunks), bool)
        stands[those] = True
        mine = np.flatnonzero(stands[owner])
        last = positions[None, mine] - trunk.start
        tokens = None if len(mine) == len(owner) else mx.array(mine, mx.int32)
        found.append(Part(trunk, slice(0, 1), size, last, tokens))
    return found
