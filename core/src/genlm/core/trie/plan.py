"""How a device sums or maximises over the items below every node, in a few dozen operations.

Differences of prefix sums would take one operation, but cancellation destroys small masses.
Instead, a binary tree is made over the weights in sorted order: neighbours are combined two by two,
level by level. The items below a node are a range of ranks, and every range consists of a few
disjoint blocks of that tree. Only disjoint parts are ever combined. So results are exact up to
rounding, for weights of any sign, and the rounding error grows with the logarithm of the number of
items.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.nodes import Ints, Nodes, count_up

Indices = npt.NDArray[np.intp]

#: The most blocks at the top of the tree. A level with fewer blocks takes as long as an empty one.
MAX_TOP_BLOCKS = 16


@frozen(eq=False)
class Plan:
    """A plan of which values to combine, in a *work row* ``[width]``.

    The work row holds, in this order: the weights by rank, which are the lowest level of the tree;
    the other levels; the results, those of the ranges with the most blocks first; and one neutral
    value as padding.

    Attributes:
        order: ``[items]`` The position of the weight of each rank.
        levels: For each level but the lowest: the places of the left values of its pairs, of the
            right values, and of the results.
        tree: The end of the tree in the work row, where the results of ranges begin.
        rounds: The first block of every range that has several blocks; then the second block; then
            the third block of the ranges that have one; and so on. Each is combined with the
            results so far.
        rest: ``[ranges, blocks]`` The blocks of the first ranges that are left after the rounds,
            padded.
        place: ``[nodes]`` The place of each node's result in the work row.
    """

    order: Indices
    levels: Sequence[tuple[slice, slice, slice]]
    tree: int
    rounds: Sequence[Indices]
    rest: Indices
    place: Indices

    @property
    def items(self) -> int:
        """The number of weights."""
        return len(self.order)

    @property
    def nodes(self) -> int:
        """The number of nodes that have a result."""
        return len(self.place)

    @property
    def width(self) -> int:
        """The length of the work row. Its last value is the padding."""
        return self.tree + len(self.rounds[0]) + 1

    def results(self, blocks: Sized) -> slice:
        """The places of the results of those ranges of which a round, or the rest, has blocks."""
        return slice(self.tree, self.tree + len(blocks))

    @classmethod
    def of(cls, order: Ints, nodes: Nodes, fewest: int) -> Plan:
        """Plan for the nodes of a trie. Nodes with the same items below are computed once.

        Args:
            order: ``[items]`` The position of the item of each rank.
            nodes: The nodes.
            fewest: The fewest ranges of a round but the first. What is left then is the rest.
        """
        base = len(order) + 1
        shared = np.flatnonzero(nodes.end - nodes.begin > 1)  # nodes that several items share
        keys = nodes.begin[shared] * base + nodes.end[shared]
        ranges, of_node = np.unique(keys, return_inverse=True)
        bounds = _bounds(len(order))
        block, counts = _blocks(ranges // base, ranges % base, bounds)
        first = np.cumsum(counts) - counts
        by_count = np.argsort(-counts, kind="stable")
        rounds = []
        for number in range(counts.max(initial=1)):
            having = by_count[: np.count_nonzero(counts > max(number, 1))]
            rounds.append(block[first[having] + number])
        tree, several = bounds[-1], by_count[: len(rounds[0])]
        result = block[first]  # the place of a range that is one block
        result[several] = tree + np.arange(len(several))
        place = nodes.begin.astype(np.intp)  # a node with one item has that item's place
        place[shared] = result[of_node]
        long = max(1, sum(len(blocks) >= fewest for blocks in rounds))
        return cls(
            order=order.astype(np.intp),
            levels=[
                (slice(start, stop - 1, 2), slice(start + 1, stop, 2), slice(stop, end))
                for start, stop, end in zip(bounds, bounds[1:], bounds[2:], strict=False)
            ],
            tree=tree,
            rounds=rounds[:long],
            rest=_padded(rounds[long:], tree + len(several)),
            place=place,
        )


def _bounds(items: int) -> list[int]:
    """The beginning of each level of the tree in the work row, lowest level first, and the end of
    the last level. If a level has an odd number of blocks, the last block is in no pair."""
    bounds, size = [0, items], items
    while size > MAX_TOP_BLOCKS:
        size //= 2
        bounds.append(bounds[-1] + size)
    return bounds


def _blocks(begin: Ints, end: Ints, bounds: Sequence[int]) -> tuple[Indices, Ints]:
    """The fewest blocks of the tree of which each range of ranks consists.

    Returns:
        The places of the blocks in the work row, range after range; and how many blocks each range
        has.
    """
    left, right = begin.copy(), end.copy()
    places: list[Ints] = []
    owners: list[Ints] = []
    *lower, top = bounds[:-1]
    for start in lower:
        odd = np.flatnonzero((left < right) & (left % 2 == 1))
        owners.append(odd)
        places.append(start + left[odd])
        left[odd] += 1
        odd = np.flatnonzero((left < right) & (right % 2 == 1))
        right[odd] -= 1
        owners.append(odd)
        places.append(start + right[odd])
        left, right = left // 2, right // 2
    owners.append(np.repeat(np.arange(len(left)), right - left))
    places.append(top + np.repeat(left, right - left) + count_up(right - left))
    owner = np.concatenate(owners)
    by_range = np.argsort(owner, kind="stable")
    return np.concatenate(places)[by_range].astype(np.intp), np.bincount(owner)


def _padded(rounds: Sequence[Indices], padding: int) -> Indices:
    """``[ranges, blocks]`` The blocks of some rounds, each a column, filled up."""
    height = len(rounds[0]) if rounds else 0
    padded = np.full((height, max(1, len(rounds))), padding, np.intp)
    for column, blocks in enumerate(rounds):
        padded[: len(blocks), column] = blocks
    return padded
