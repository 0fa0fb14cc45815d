"""The tree of segments, in which state that several contexts share is stored once.

For engines that keep the KV cache themselves. A context is a path of shared prefixes
(:class:`Trunk`) and a :class:`Slot`. A shared prefix is never written again, and any number of
contexts may read it. A slot is the tail of one context, and is written in place as the context
grows. The engine decides what the state is and where it is stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import Factory, define, field

from genlm.core.context import Context
from genlm.kit.prefixes import bytes_of, length_of, prefix_of


@define(eq=False)
class Segment:
    """State of positions ``start`` to ``stop`` (exclusive) of a context.

    Attributes:
        context: The context to the end of this segment.
        version: The version of the adapter; 0 is the base model.
        start: The first position that is stored here.
        parent: The shared prefix that holds the positions before ``start``. If it is longer, only
            its positions before ``start`` belong to this context.
        pinned: Whether the segment stays until the state is cleared.
        stop: The length of the context.
        name: The version of the adapter, and the hash of the context.
        known_key: The key of those leading tokens for which a key has been made.
        children: The segments whose parent this is; only shared prefixes have children.

    Examples:
        >>> from genlm.core.context import Context
        >>> trunk = Trunk(Context((1, 2, 3)))
        >>> slot = Slot(Context((1, 2, 7, 8)), index=5)
        >>> slot.stand_on(trunk, 2)
        >>> slot.size, [(below.stop, used) for below, used in slot.path()]
        (2, [(3, 2)])
        >>> [(type(part).__name__, used) for part, used in slot.parts(3)]
        [('Trunk', 2), ('Slot', 1)]
    """

    context: Context
    version: int = 0
    start: int = 0
    parent: Trunk | None = None
    pinned: bool = False
    stop: int = field(init=False, default=Factory(lambda self: len(self.context), takes_self=True))
    name: tuple[int, int] = field(
        init=False,
        default=Factory(lambda self: (self.version, self.context.hash_value), takes_self=True),
        repr=False,
    )
    children: set[Segment] = field(factory=set, init=False, repr=False)
    known_key: bytes = field(
        init=False,
        default=Factory(lambda self: bytes_of((self.version,)), takes_self=True),
        repr=False,
    )

    @property
    def key(self) -> bytes:
        """The context as bytes (:func:`~genlm.kit.prefixes.key_of`). Tokens added after the
        key was last asked for are appended to it."""
        known = length_of(self.known_key)
        if known < self.stop:
            self.known_key += bytes_of(self.context.since(known))
        return self.known_key

    @property
    def size(self) -> int:
        """The number of positions stored here."""
        return self.stop - self.start

    def begins_like(self, known_key: bytes, length: int) -> None:
        """Take over the key of a context with which this one has ``length`` first tokens in
        common."""
        self.known_key = prefix_of(known_key, min(length, self.stop))

    def path(self) -> Iterator[tuple[Trunk, int]]:
        """The shared prefixes below this segment, the nearest first, each with how many of its
        positions belong to this context."""
        above: Segment = self
        while above.parent is not None:
            yield above.parent, above.start - above.parent.start
            above = above.parent

    def parts(self, stop: int) -> list[tuple[Segment, int]]:
        """The segments that hold the first ``stop`` positions of the context, in order, each with
        how many of its own first positions belong to them."""
        above = [(self, stop - self.start), *self.path()]
        return [
            (segment, min(size, stop - segment.start))
            for segment, size in reversed(above)
            if segment.start < stop
        ]

    def stand_on(self, parent: Trunk | None, start: int) -> None:
        """Enter the tree above ``parent``, at position ``start``, or move there."""
        self.leave()
        self.parent, self.start = parent, start
        if parent is not None:
            parent.children.add(self)

    def leave(self) -> None:
        """Leave the tree. Parents and children refer to each other, so without this call, memory
        would only be freed by the garbage collector."""
        if self.parent is not None:
            self.parent.children.discard(self)
            self.parent = None


@define(eq=False)
class Trunk(Segment):
    """A shared prefix: state that is never written again.

    Attributes:
        layers: The state of each layer, as the engine has it.
    """

    layers: list[Any] = field(factory=list, repr=False)


@define(eq=False)
class Slot(Segment):
    """State in a slot of the engine's table: column ``c`` holds position ``start + c``.

    Attributes:
        index: The number of the slot in the table. It changes when the table is resized.
    """

    index: int = -1
