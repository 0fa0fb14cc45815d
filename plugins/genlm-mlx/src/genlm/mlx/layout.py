"""The layout of one forward pass: where each token's keys and values go, and what it attends to.

For the model each token is its own row, so nothing is padded outside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import mlx.core as mx
from genlm.kit.segments import Trunk
from genlm.mlx.chunk import Chunk, LayerState
from genlm.mlx.groups import Group, TrunkGroup, below_of, row_group

#: Rows with up to this many new tokens are attended together, each padded to the longest.
FEW = 8


class Layout:
    """Chunks of trunks and rows, in one forward pass.

    Attributes:
        chunks: The chunks, in the order in which their tokens are fed.
        offsets: The position of each token.
        last: The place of each chunk's last token.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        orders = [_order(chunk) for chunk in chunks]
        places = sorted(range(len(chunks)), key=orders.__getitem__)
        self.chunks = [chunks[at] for at in places]
        self._orders = [orders[at] for at in places]
        sizes = [len(chunk.tokens) for chunk in self.chunks]
        self._bounds = [0, *accumulate(sizes)]
        self.last = [stop - 1 for stop in self._bounds[1:]]
        offsets = [at for chunk in self.chunks for at in range(chunk.start, chunk.stop)]
        self.offsets = mx.array(offsets, mx.int32)
        self._trunks = [one for one in self.chunks if isinstance(one.segment, Trunk)]
        self._rows = self.chunks[len(self._trunks) :]
        self._places = self._row_places()
        self._groups = self._grouped()

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def versions(self) -> list[int]:
        """The version of each token's adapter."""
        return [chunk.version for chunk in self.chunks for _ in chunk.tokens]

    # --- what a layer does ------------------------------------------------------------------------

    def write(self, table: LayerState, layer: int, new: LayerState) -> None:
        """Put the tokens' new keys and values, ``[tokens, heads, 1, dim]``, into trunks and the
        table."""
        for at, chunk in enumerate(self._trunks):
            assert isinstance(chunk.segment, Trunk)
            start, stop = chunk.columns.start, chunk.columns.stop
            for state, more in zip(chunk.segment.layers[layer], new, strict=True):
                mine = more[self._bounds[at] : self._bounds[at + 1]]
                state[:, :, start:stop] = mine.transpose(2, 1, 0, 3)
        if self._rows:
            slots, columns = self._places
            for state, more in zip(table, new, strict=True):
                mine = more[self._bounds[len(self._trunks)] :]
                if isinstance(columns, int):
                    state[slots, :, columns : columns + 1] = mine
                else:
                    state[slots, :, columns] = mine[:, :, 0]

    def attend(
        self, queries: mx.array, state: LayerState, layer: int, scale: float, window: int | None
    ) -> mx.array:
        """Attention of ``[tokens, heads, 1, dim]`` queries, to a window or to all earlier
        positions."""
        found = [
            group.attend(queries[group.tokens], state, layer, scale, window)
            for group in self._groups
        ]
        return found[0] if len(found) == 1 else mx.concatenate(found)

    # --- how it is laid out -----------------------------------------------------------------------

    def _row_places(self) -> tuple[Any, Any]:
        """Where the rows' tokens go: neighbouring slots and one column, or an array of each."""
        columns = [chunk.columns for chunk in self._rows]
        slots = [chunk.slot for chunk in self._rows]
        alike = set(columns)
        if len(alike) == 1 and len(columns[0]) == 1 and _is_run(slots):
            return slice(slots[0], slots[-1] + 1), columns[0].start
        each_slot = [slot for slot, own in zip(slots, columns, strict=True) for _ in own]
        each_column = [column for own in columns for column in own]
        return mx.array(each_slot, mx.int32), mx.array(each_column, mx.int32)

    def _grouped(self) -> list[Group]:
        groups: list[Group] = []
        for at, chunk in enumerate(self._trunks):
            tokens = slice(self._bounds[at], self._bounds[at + 1])
            groups.append(TrunkGroup(tokens, below_of([chunk]), chunk))
        start = len(self._trunks)
        for stop in range(start + 1, len(self.chunks) + 1):
            if stop == len(self.chunks) or self._orders[stop][:2] != self._orders[start][:2]:
                tokens = slice(self._bounds[start], self._bounds[stop])
                groups.append(row_group(tokens, self.chunks[start:stop]))
                start = stop
        return groups


def _order(chunk: Chunk) -> tuple[bool, int, int]:
    """Trunks first, those below before those above; then rows, grouped by about the same number of
    new tokens, in the order of the table."""
    if isinstance(chunk.segment, Trunk):
        return False, 0, chunk.start
    return True, ((len(chunk.tokens) + FEW - 1) // FEW).bit_length(), chunk.slot


def _is_run(slots: Sequence[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(slots))
