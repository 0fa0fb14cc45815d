"""Chunk: tokens of one context that a forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

import mlx.core as mx
from genlm.kit.segments import Row, Segment

#: Keys and values of one layer, ``[1, heads, positions, head_dim]`` each.
LayerState = tuple[mx.array, mx.array]


@frozen(eq=False)
class Chunk:
    """Tokens of one context that a forward pass computes.

    Attributes:
        segment: Where their state goes.
        start: The position of the first token.
        tokens: The tokens.
        version: The version of the context's adapter.
    """

    segment: Segment
    start: int
    tokens: Sequence[int]
    version: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    @property
    def columns(self) -> range:
        """The columns of the segment that the tokens take."""
        return range(self.start - self.segment.start, self.stop - self.segment.start)

    @property
    def slot(self) -> int:
        """The slot of its row in the table."""
        assert isinstance(self.segment, Row)
        return self.segment.slot
