"""Chunk: tokens of one context that a forward pass computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import mlx.core as mx
from genlm.kit.segments import Segment

#: Keys and values of one layer, ``[batch, heads, positions, head_dim]`` each.
LayerState = tuple[mx.array, mx.array]


class Chunk(NamedTuple):
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
