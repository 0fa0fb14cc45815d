"""The tree of segments: what contexts share is stored once, what is theirs alone lies beside it.

A context is a path of trunks and a row. A trunk is immutable and may be shared by any number of
contexts; a row is one context's own tail, written in place as the context grows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from attrs import define, field

from genlm.hf.sequence import length_of

#: Keys and values of one layer, ``[1, heads, positions, head_dim]`` each.
LayerStates = tuple[torch.Tensor, torch.Tensor]


@define(eq=False)
class Segment:
    """Key/value state of positions ``start`` to ``stop`` (exclusive) of a context.

    Attributes:
        key: The context to the end of this segment, see
            :class:`~genlm.hf.sequence.TokenSequence`.
        start: The first position that is stored here.
        parent: The trunk that holds the positions before; it may be longer than ``start``, then
            only its beginning belongs to this context.
        pinned: Whether it stays until the state is cleared.
        children: The segments that stand on this one; only trunks have some.
    """

    key: bytes
    start: int
    parent: Trunk | None = None
    pinned: bool = False
    children: set[Segment] = field(factory=set, init=False, repr=False)

    @property
    def stop(self) -> int:
        """The length of the context to the end of this segment."""
        return length_of(self.key)

    @property
    def size(self) -> int:
        """The number of positions stored here."""
        return self.stop - self.start

    def path(self) -> Iterator[tuple[Trunk, int]]:
        """The trunks below this segment, the nearest first, each with how many of its positions
        belong to this context."""
        above: Segment = self
        while above.parent is not None:
            yield above.parent, above.start - above.parent.start
            above = above.parent

    def attach(self) -> None:
        """Become a child of the parent."""
        if self.parent is not None:
            self.parent.children.add(self)

    def detach(self) -> None:
        """Leave the tree. (Parents and children refer to each other: memory is free at once only
        if they let go.)"""
        if self.parent is not None:
            self.parent.children.discard(self)
            self.parent = None


@define(eq=False)
class Trunk(Segment):
    """Immutable state.

    Attributes:
        layers: The state of each layer.
    """

    layers: list[LayerStates] = field(factory=list, repr=False)


@define(eq=False)
class Row(Segment):
    """State in a row of the pool: column ``c`` holds position ``start + c``.

    Attributes:
        slot: The row. It changes when the pool is resized.
    """

    slot: int = -1
