"""The layout of one forward pass: where each token's keys and values go, and what it attends to.

The model gets each token as a sequence of its own, so nothing is padded outside attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

import mlx.core as mx
from genlm.kit.segments import Slot
from genlm.mlx.chunk import Chunk, LayerState
from genlm.mlx.groups import Group

#: The attention of slots with up to this many new tokens is computed together, each padded to the
#: longest.
MAX_PADDED_TOKENS = 8


class Layout:
    """The chunks of one forward pass, in trunks and slots; at most one chunk of each segment.

    Attributes:
        tokens: The tokens. Those of trunks come first, trunk by trunk. Those of slots follow, in
            groups with about the same number of new tokens, each in the order of the table.
        versions: The version of each token's adapter.
        offsets: The position of each token.
        last: The index of each chunk's last token.
        trunks: The trunks.
    """

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        widths = np.array([len(chunk.tokens) for chunk in chunks])
        segments = [chunk.segment for chunk in chunks]
        indices = np.array([one.index if isinstance(one, Slot) else -1 for one in segments])
        kinds = np.where(
            indices < 0,
            -1 - np.arange(len(chunks)),
            np.ceil(np.log2(np.maximum(widths, MAX_PADDED_TOKENS))),
        )
        order = np.lexsort((indices, kinds))
        chunks = [chunks[at] for at in order.tolist()]
        widths, indices, kinds = widths[order], np.maximum(indices[order], 0), kinds[order]
        bounds = [0, *(1 + np.flatnonzero(np.diff(kinds))).tolist(), len(chunks)]
        ends = np.cumsum(widths)
        self.last = np.empty_like(ends)
        self.last[order] = ends - 1
        self.tokens = [token for chunk in chunks for token in chunk.tokens]
        self.versions = np.repeat([chunk.version for chunk in chunks], widths)
        self._groups = [
            Group.of(int(ends[at] - widths[at]), chunks[at:to], widths[at:to], indices[at:to])
            for at, to in pairwise(bounds)
        ]
        self.trunks = [group.own.trunk for group in self._groups if group.own.trunk is not None]
        positions = np.concatenate([group.positions for group in self._groups])
        self.offsets = mx.array(positions, mx.int32)

    def write(self, state: LayerState, layer: int, new: LayerState) -> None:
        """Put the tokens' new keys and values, ``[tokens, heads, 1, dim]``, into trunks and the
        table."""
        for group in self._groups:
            group.write(state, layer, new)

    def attend(
        self,
        queries: mx.array,
        state: LayerState,
        layer: int,
        scale: float,
        window: int | None,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attention of ``[tokens, heads, 1, dim]`` queries, to a window or to all earlier
        positions, and to a sink for each head."""
        found = [g.attend(queries, state, layer, scale, window, sinks) for g in self._groups]
        return found[0] if len(found) == 1 else mx.concatenate(found)
