"""How to sum or maximise over every node's range of words in a few dozen array operations.

Differences of prefix sums would be one operation, but they lose small masses to cancellation. Instead, neighbours are
combined to pairs, pairs to fours, and so on (a segment tree, bottom up), and every range is the disjoint union of a few
such blocks, at most two of each size. The ranges of most blocks come first, so that one operation adds a second block to
all ranges that have one, the next a third, and so on. As only disjoint parts are ever combined, results are exact up to
rounding, for weights of any sign.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.layout import Layout
from genlm.core.trie.words import Ints

Indices = npt.NDArray[np.intp]


@frozen
class Level:
    """The blocks of one size: a slice of the work row."""

    start: int
    blocks: int

    @property
    def stop(self) -> int:
        """The end of the slice, which has an even length: its last element may be padding."""
        return self.start + self.blocks + self.blocks % 2


@frozen(eq=False)
class Plan:
    """What to combine with what. Indices are into a work row ``[width]``: all levels of blocks, then all ranges.

    Attributes:
        order: ``[words]`` Position of the word of each rank.
        levels: Blocks of 1 word, of 2, of 4, up to one that holds all.
        parts: Element ``j`` holds the index of the ``j``-th block for each range that has more than ``j``.
        ranges: Where the ranges begin in the work row.
        width: The length of the work row.
        place: ``[nodes]`` Where in the work row each node's result is.
    """

    order: Indices
    levels: tuple[Level, ...]
    parts: tuple[Indices, ...]
    ranges: int
    width: int
    place: Indices

    @property
    def nodes(self) -> int:
        """The number of nodes that have a result."""
        return len(self.place)

    @classmethod
    def of(cls, order: Ints, layout: Layout) -> Plan:
        """Plan for the nodes of ``layout``; nodes with equal ranges are computed once."""
        levels = _levels(len(order))
        is_range = layout.end - layout.begin > 1
        base = len(order) + 1
        keys, range_of_node = np.unique(layout.begin[is_range] * base + layout.end[is_range], return_inverse=True)
        part_of, block_of = _blocks(keys // base, keys % base, levels)
        parts, rank_of_range = _parts(part_of, block_of, len(keys))
        ranges = levels[-1].stop
        place = layout.begin.astype(np.intp)  # the node of a single word: its block of one
        place[is_range] = ranges + rank_of_range[range_of_node]
        return cls(order.astype(np.intp), levels, parts, ranges, ranges + len(keys), place)


def _levels(words: int) -> tuple[Level, ...]:
    levels = [Level(0, words)]
    while levels[-1].blocks > 1:
        levels.append(Level(levels[-1].stop, (levels[-1].blocks + 1) // 2))
    return tuple(levels)


def _blocks(begin: Ints, end: Ints, levels: tuple[Level, ...]) -> tuple[Ints, Ints]:
    """Cut all ranges into blocks, from the small ones at their ends inwards: pairs (range, index of block)."""
    ranges, blocks = [], []
    for level in levels:
        odd = np.flatnonzero((begin < end) & (begin % 2 == 1))
        ranges.append(odd)
        blocks.append(level.start + begin[odd])
        begin = (begin + 1) // 2
        odd = np.flatnonzero((begin * 2 < end) & (end % 2 == 1))
        ranges.append(odd)
        blocks.append(level.start + end[odd] - 1)
        end = end // 2
    return np.concatenate(ranges), np.concatenate(blocks)


def _parts(range_of: Ints, block: Ints, ranges: int) -> tuple[tuple[Indices, ...], Ints]:
    """The first blocks, the second blocks, ... by the rank of their range; and these ranks, most blocks first."""
    count = np.bincount(range_of, minlength=ranges)
    rank = np.empty(ranges, np.int64)
    rank[np.argsort(-count, kind="stable")] = np.arange(ranges)
    order = np.argsort(rank[range_of], kind="stable")
    rank_of, block = rank[range_of][order], block[order]
    ordinal = np.arange(len(order)) - np.searchsorted(rank_of, rank_of)
    return tuple(block[ordinal == j].astype(np.intp) for j in range(int(count.max(initial=0)))), rank
