"""When to share, when to copy, and when to wait."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Generic, TypeVar

from attrs import frozen

from genlm.kit.kv.sequence import TokenSequence
from genlm.kit.prefixes import PrefixIndex, length_of, shared_length, tokens_in
from genlm.kit.segments import Slot, Trunk

T = TypeVar("T")


@frozen
class SharingCosts:
    """The numbers for decisions on sharing, in positions unless noted.

    Attributes:
        step: The number of columns of a slot is a multiple of this.
        waiting: Sequences wait for another sequence of the batch if that saves them at least this
            many tokens in all. One more forward takes as long as this many tokens.
        sharing: The common prefix of forks becomes a shared prefix if this saves copies of at least
            this many positions in all; otherwise it is copied. A shared prefix costs one more
            matrix product in every layer of every forward, which takes as long as attention over
            this many positions in slots.
        product: A context reads an existing shared prefix in place if it has at least this many of
            its positions; otherwise it copies them.
        trunk: The common prefix of forks becomes a shared prefix if it has at least this many
            positions. So does every slot of at least this many positions if it is much longer than
            the others, because all slots are as long as the longest; and every such slot once half
            of the budget is used, if that saves memory.
        waste: How many times the memory of its positions the table may take. Beyond that, the
            longest slots become shared prefixes.
        spare: How many more positions each slot may take.
        collecting: To save memory, the common prefix of slots becomes a shared prefix if it has at
            least this many positions.
        outliers: How many slots shorter than ``trunk`` may become shared prefixes because they are
            longer than the others.
        path: How many shared prefixes a context usually has at most.
        plenty: While less than half of the budget is used, state becomes a shared prefix only if
            this saves at least this many positions. For devices on which launching the kernels of a
            shared prefix takes as long as computing this many positions.
        each: A sequence waits only if another one computes at least this many of its tokens, so
            sequences that grow by few tokens are not compared. If there are scores in the batch,
            two tokens are enough.
    """

    step: int = 32
    waiting: int = 40
    sharing: int = 1024
    product: int = 64
    trunk: int = 512
    waste: float = 1.25
    spare: int = 48
    collecting: int = 64
    outliers: int = 4
    path: int = 6
    plenty: int = 0
    each: int = 8

    def columns(self, length: int) -> int:
        """How many columns are allotted for ``length`` positions."""
        return -(-length // self.step) * self.step

    def shared(self, size: int, saved: int) -> bool:
        """Whether ``size`` positions of a slot become a shared prefix, which saves copies of
        ``saved`` positions."""
        return (saved >= self.sharing or size >= self.trunk) and saved >= self.plenty

    def a_product(self, trunk: Trunk, start: int, saved: int) -> bool:
        """Whether a context that leaves a shared prefix at ``start`` reads it in place. Otherwise
        its positions are copied.

        Args:
            trunk: The shared prefix.
            start: The position at which the context leaves it.
            saved: How many positions all contexts of the batch together would not copy.
        """
        with_others = start == trunk.stop and len(trunk.children) > 0
        return with_others or (start - trunk.start >= self.product and saved >= self.plenty)

    def too_wide(self, longest: int, count: int, total: int) -> bool:
        """Whether slots as long as the longest are much longer than their contents.

        Args:
            longest: The number of positions in the longest slot.
            count: The number of slots.
            total: The number of positions in all slots.
        """
        most = self.waste * total + self.step * count + self.plenty
        return longest > 2 * self.step and self.columns(longest) * count > most

    def saves_room(self, sizes: Sequence[int], columns: int) -> bool:
        """Whether the table takes less memory if each long slot becomes a shared prefix with a slot
        as long as the other slots. If all slots are long, it does.

        Args:
            sizes: The number of positions in each slot.
            columns: The number of columns that each slot takes.
        """
        long = sum([size for size in sizes if size >= self.trunk])
        rest = max([size for size in sizes if size < self.trunk], default=0)
        return not rest or long + len(sizes) * self.columns(rest) < len(sizes) * columns

    def long(self, tails: Iterable[tuple[int, T]]) -> list[T]:
        """The owners of the slots that are long enough for a shared prefix.

        Args:
            tails: The size of each slot, and its owner.
        """
        return [owner for size, owner in tails if size >= self.trunk]

    def outliers_of(self, tails: Iterable[tuple[int, T]]) -> list[T]:
        """The owners of the long slots, or of a few others, that make all slots much longer than
        their contents.

        Args:
            tails: The size of each slot, and its owner.
        """
        ordered = sorted(tails, key=itemgetter(0), reverse=True)
        total = sum(map(itemgetter(0), ordered))
        few = max(len(self.long(ordered)), self.outliers)
        found: list[T] = []
        for at, (size, owner) in enumerate(ordered[: few + 1]):
            if not self.too_wide(size, len(ordered) - at, total):
                return found
            found.append(owner)
            total -= size
        return self.long(ordered)


class BatchCost(Generic[T]):
    """Sequences that are computed together, and what one more would cost.

    Args:
        least: The fewest tokens for which a sequence waits for another one; infinite if sequences
            never wait.
        nests: Whether a sequence and a prefix of it are always computed in one forward.
    """

    def __init__(self, least: float, nests: bool = False) -> None:
        self._least, self._nests = least, nests
        # No key is made for a sequence with fewer tokens to compute, because that would take too
        # long.
        self._new = min(least, 2) if nests else least
        self._index: PrefixIndex[bytes, tuple[T, int]] = PrefixIndex()

    def add(self, sequence: TokenSequence, known: int, value: T) -> None:
        """Add a sequence to the batch. The state of its ``known`` leading tokens is kept."""
        # A sequence that computes fewer tokens has too few to share.
        if sequence.length - known >= self._new:
            self._index.add(sequence.key, (value, known))

    def leader(self, sequence: TokenSequence, known: int) -> tuple[T | None, int]:
        """The sequence of the batch that another one may wait for, if any, and how many leading
        tokens the waiting one need not compute then. The state of ``known`` tokens is kept already.
        A sequence inside one of the batch waits for none."""
        if sequence.length - known < self._new:
            return None, known
        nearest, common = self._index.nearest(sequence.key)
        if nearest is None:
            return None, known
        value, start = self._index[nearest]
        shared = tokens_in(common)
        inside = shared == sequence.length and start < shared
        if self._nests and shared > known and (inside or shared == length_of(nearest)):
            return value, shared
        shared = min(shared, sequence.latest_start)
        return (value, shared) if shared - known >= self._least else (None, known)


#: Slots on the same trunk, in the order of their keys, and the lengths of the common prefixes of
#: neighbours.
Family = tuple[list[Slot], list[int]]


def families_of(slots: Iterable[Slot]) -> list[Family]:
    """Slots by the trunk and position that they stand on, with their common positions after it."""
    families: dict[tuple[Trunk | None, int], list[tuple[bytes, Slot]]] = {}
    for key, slot in sorted(((slot.key, slot) for slot in slots), key=itemgetter(0)):
        families.setdefault((slot.parent, slot.start), []).append((key, slot))
    return [
        (
            [slot for _, slot in family],
            [max(shared_length(a, b) - start, 0) for (a, _), (b, _) in pairwise(family)],
        )
        for (_, start), family in families.items()
    ]


def common_parts(family: Family, least: int) -> Iterator[tuple[list[Slot], int]]:
    """Common parts of slots that save at least this many positions as trunks, each with the
    position at which it stops: first the part that saves most, then those of the slots on its left
    and on its right."""
    left = [family]
    while left:
        slots, shared = left.pop()
        saved, first, last, size = best_part(shared)
        if saved >= max(least, 1):
            yield slots[first : last + 1], slots[0].start + size
            left.append((slots[:first], shared[: max(first - 1, 0)]))
            left.append((slots[last + 1 :], shared[last + 1 :]))


def best_part(shared: Sequence[int]) -> tuple[int, int, int, int]:
    """The common part of neighbouring slots that saves most as a trunk: how many positions it
    saves, the first and the last slot, and its size.

    Args:
        shared: How many positions each slot has in common with the next one.
    """
    parts = ((size * (last - first), first, last, size) for first, last, size in parts_of(shared))
    return max(parts, key=itemgetter(0), default=(0, 0, 0, 0))


def parts_of(shared: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """All common parts of neighbouring slots: the first and the last slot, and the size. A part may
    lie within a longer run of slots that have less in common.

    Args:
        shared: How many positions each slot has in common with the next one.

    Examples:
        >>> sorted(parts_of([3, 1, 0, 2, 2]))
        [(0, 1, 3), (0, 2, 1), (3, 5, 2)]
    """
    # The first slot, and the length of the common prefix from there on.
    rising: list[tuple[int, int]] = []
    for at, common in enumerate([*shared, 0]):
        since = at
        while rising and rising[-1][1] > common:
            since, size = rising.pop()
            yield since, at, size
        if common > (rising[-1][1] if rising else 0):
            rising.append((since, common))


def best_cut(cuts: Sequence[int], start: int) -> tuple[int, int]:
    """The best place to cut a segment that is forked at ``cuts``: the one from which the most
    positions after ``start`` need no copy. Also the number of these positions."""
    ordered = sorted(cuts, reverse=True)
    return max(
        ((cut, (cut - start) * count) for count, cut in enumerate(ordered, 1)),
        key=lambda part: part[1],
    )
