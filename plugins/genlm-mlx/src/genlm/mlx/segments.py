"""The tree of segments: what contexts share is stored once, what is theirs alone lies beside it.

A context is a path of trunks and a row. A trunk is never written again and may be shared by any
number of contexts; a row is one context's own tail, which grows in place.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from attrs import define, field

import mlx.core as mx
from genlm.core.prefixes import common_length

#: Keys and values of one layer, ``[1, heads, positions, head_dim]`` each.
LayerState = tuple[mx.array, mx.array]

WIDTH = array("I").itemsize


def packed(key: Sequence[int]) -> bytes:
    """An adapter's version and tokens as bytes, which compare faster."""
    return array("I", key).tobytes()


def unpacked(key: bytes) -> array[int]:
    """An adapter's version and tokens."""
    return array("I", key)


def length_of(key: bytes) -> int:
    """How many tokens a key has."""
    return len(key) // WIDTH - 1


def prefix_of(key: bytes, length: int) -> bytes:
    """The key of the first ``length`` tokens."""
    return key[: WIDTH * (length + 1)]


def shared_length(left: bytes, right: bytes) -> int:
    """How many leading tokens two keys share; none where adapters differ."""
    return tokens_in(common_length(left, right))


def tokens_in(shared: int) -> int:
    """How many whole tokens lie in the first ``shared`` bytes of a key."""
    return max(shared // WIDTH - 1, 0)


@define(eq=False)
class Segment:
    """State of positions ``start`` to ``stop`` (exclusive) of a context.

    Attributes:
        key: The context to the end of this segment.
        start: The first position that is stored here.
        parent: The trunk with the positions before. It may be longer than ``start``: then only its
            beginning belongs to this context.
        pinned: Whether it stays until all is cleared.
        children: The segments that stand on this one; only trunks have some.
    """

    key: bytes
    start: int = 0
    parent: Trunk | None = None
    pinned: bool = False
    children: set[Segment] = field(factory=set, init=False, repr=False)

    @property
    def stop(self) -> int:
        """The length of the context to the end of this segment."""
        return length_of(self.key)

    @property
    def size(self) -> int:
        """How many positions are stored here."""
        return self.stop - self.start

    def path(self) -> Iterator[tuple[Trunk, int]]:
        """The trunks below, the nearest first, each with how many of its positions belong to this
        context."""
        above: Segment = self
        while above.parent is not None:
            yield above.parent, above.start - above.parent.start
            above = above.parent

    def stand_on(self, parent: Trunk | None, start: int) -> None:
        """Move to another place in the tree."""
        self.leave()
        self.parent, self.start = parent, start
        if parent is not None:
            parent.children.add(self)

    def leave(self) -> None:
        """Leave the tree."""
        if self.parent is not None:
            self.parent.children.discard(self)
            self.parent = None


@define(eq=False)
class Trunk(Segment):
    """State that is never written again.

    Attributes:
        layers: The state of each layer.
    """

    layers: list[LayerState] = field(factory=list, repr=False)

    @property
    def nbytes(self) -> int:
        return sum(int(state.nbytes) for layer in self.layers for state in layer)


@define(eq=False)
class Row(Segment):
    """State in a row of the table: column ``c`` holds position ``start + c``.

    Attributes:
        slot: The row. It changes when the table is resized.
    """

    slot: int = -1
