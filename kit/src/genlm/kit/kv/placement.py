"""Placements: where sequences run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Generic, TypeVar

from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.segments import Segment, Slot, Trunk

A = TypeVar("A", bound=TokenSequence)


class Placement(Generic[A]):
    """The place where a sequence is computed.

    Attributes:
        index: The index of the sequence in the list that the planner was given.
        sequence: The sequence.
        found: The segment that the sequence starts from.
        shared: How many leading tokens the sequence has in common with ``found``.
        start: The first position to compute; the state of all positions before it is kept already.
        slot: The slot that the sequence ends in; ``None`` if it ends in ``trunk``.
        trunk: A new shared prefix that is computed for this sequence, before the slot.
        continued: Whether the slot already held a prefix of this sequence.
        kept: Whether the sequence's state is new and will be kept; otherwise its whole context is
            kept already.
        parent: The shared prefix below the sequence's first new segment.
        base: The first position of the first new segment, or of the slot that is continued.
        source: The segment from which positions ``base`` to ``start`` are copied.
        cut: The end of the new shared prefix; ``base`` if there is none.
        inside: The placements of sequences that are prefixes of this one. All their wanted
            positions are computed for this sequence, so their rows are read from its forward.
    """

    slot: Slot | None = None
    trunk: Trunk | None = None
    continued = False
    parent: Trunk | None = None
    base = 0
    source: Segment | None = None
    cut = 0
    inside: Sequence[Placement[A]] = ()

    def __init__(
        self, index: int, sequence: A, found: Segment | None = None, shared: int = 0
    ) -> None:
        self.index, self.sequence, self.found, self.shared = index, sequence, found, shared
        self.start = min(shared, sequence.latest_start)
        self.kept = shared < sequence.length

    @property
    def end(self) -> Slot | Trunk:
        """The segment that the sequence ends in."""
        end = self.slot or self.trunk
        assert end is not None, "the sequence has not been placed"
        return end

    @property
    def needs_slot(self) -> bool:
        """Whether the sequence takes a new slot."""
        return not self.continued and self.cut < self.sequence.length

    @property
    def new_tokens(self) -> int:
        """How many tokens are computed for the sequence."""
        return self.sequence.length - self.start

    @property
    def own(self) -> list[Slot | Trunk]:
        """The new segments of the sequence, or the slot that it continues, in the order of their
        positions."""
        return [segment for segment in (self.trunk, self.slot) if segment is not None]

    def computes(self, other: Placement[A]) -> bool:
        """Whether the forward of this sequence computes all wanted positions of another sequence,
        which is a prefix of this one."""
        return self.start <= other.sequence.latest_start

    def indices(self) -> list[int]:
        """The indices of the sequences whose rows this forward gives: this sequence and those
        inside it."""
        return [placement.index for placement in (self, *self.inside)]

    def rows(self) -> list[tuple[int, int]]:
        """The wanted rows: for each, the index of the sequence and the position."""
        return [
            (placement.index, at)
            for placement in (self, *self.inside)
            for at in range(placement.sequence.latest_start, placement.sequence.length)
        ]

    def below(self) -> Segment | None:
        """The segment that holds the last position before ``start``; ``None`` if there is none."""
        below = self.found
        while below is not None and self.start <= below.start:
            below = below.parent
        return below

    def segments(self, start: int, stop: int) -> list[tuple[Slot | Trunk, int, int]]:
        """The segments that store positions ``start`` to ``stop`` (exclusive), each with its own
        part of these positions: its start, and its stop."""
        slot, trunk = self.slot, self.trunk
        found: list[tuple[Slot | Trunk, int, int]] = []
        if trunk is not None and start < (below := min(stop, trunk.stop)):
            found.append((trunk, start, below))
            start = below
        if slot is not None and start < stop:
            found.append((slot, start, stop))
        return found


def nested(batch: Sequence[Placement[A]]) -> list[Placement[A]]:
    """The placements without those that are inside of others, which then have them."""
    alike: defaultdict[tuple[int, Segment | None, int], list[Placement[A]]] = defaultdict(list)
    # A sequence that begins with another one shares as much with known contexts.
    for placement in batch:
        alike[placement.sequence.version, placement.found, placement.shared].append(placement)
    within = set[Placement[A]]()
    for some in alike.values():
        if len({placement.sequence.length for placement in some}) == 1:
            continue  # no sequence begins with another, so no key is made
        some.sort(key=lambda placement: placement.sequence.key, reverse=True)
        whole, *others = some
        for part in others:  # these follow the sequences that begin with them
            if whole.sequence.key.startswith(part.sequence.key) and whole.computes(part):
                whole.inside = [*whole.inside, part]
                within.add(part)
            else:
                whole = part
    return [placement for placement in batch if placement not in within] if within else [*batch]
