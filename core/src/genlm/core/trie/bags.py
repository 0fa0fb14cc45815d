"""A second way for accelerators: few launches, and no more memory traffic than they need.

The items below a node are a range of ranks. It consists of a few whole blocks of ``BLOCK_RANKS``,
``BLOCK_RANKS**2``, ... ranks, and of the items at both of its ends: a *bag* of places in a table of
the weights by rank and of the blocks' results. So a call is one gather, a reduction for each level
of blocks, one reduction of all bags (PyTorch's ``embedding_bag``), and one gather of nodes' places.
Only disjoint parts are combined and nothing is subtracted: results are as exact as those of the
other ways.

Each row of weights is a column here, so that neighbouring threads read neighbouring values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from attrs import frozen

from genlm.core.trie.device import DeviceKernel, on_device
from genlm.core.trie.nodes import Ints, Nodes, count_up
from genlm.core.trie.plan import Indices
from genlm.core.trie.weights import SUM, Operation

if TYPE_CHECKING:
    import torch

#: How many ranks, or blocks of the level below, are in a block.
BLOCK_RANKS = 16


@frozen(eq=False)
class Bags:
    """A plan of which values to combine, in a table ``[table + bags, rows]`` with the weights by
    rank, the blocks level by level, and the results of the bags.

    Attributes:
        order: ``[items]`` The position of the weight of each rank.
        sizes: How many values each level has, the lowest first: the items, and whole blocks.
        inside: The places in the table of the values in the bags, bag after bag.
        starts: ``[bags]`` The index in ``inside`` at which each bag begins.
        place: ``[nodes]`` The place of each node's result in the table.
    """

    order: Indices
    sizes: list[int]
    inside: Indices
    starts: Indices
    place: Indices

    @property
    def items(self) -> int:
        """The number of weights."""
        return len(self.order)

    @property
    def nodes(self) -> int:
        """The number of nodes that have a result."""
        return len(self.place)

    @classmethod
    def of(cls, order: Ints, nodes: Nodes) -> Bags:
        """Plan for the nodes of a trie. Nodes with the same items below share a bag."""
        base = len(order) + 1
        several = np.flatnonzero(nodes.end - nodes.begin > 1)
        keys = nodes.begin[several] * base + nodes.end[several]
        ranges, of_node = np.unique(keys, return_inverse=True)
        sizes = [len(order)]
        while sizes[-1] >= BLOCK_RANKS:
            sizes.append(sizes[-1] // BLOCK_RANKS)
        inside, counts = _contents(ranges // base, ranges % base, sizes)
        place = nodes.begin.copy()  # a node with one item has that item's place
        place[several] = sum(sizes) + of_node
        return cls(order, sizes, inside, np.cumsum(counts) - counts, place)


def _contents(begin: Ints, end: Ints, sizes: list[int]) -> tuple[Ints, Ints]:
    """The fewest items and blocks that each range of ranks consists of.

    Returns:
        Their places in the table, range after range; and how many each range has.
    """
    left, right, start = begin, end, 0
    places: list[Ints] = []
    owners: list[Ints] = []

    def take(first: Ints, count: Ints) -> None:
        places.append(start + np.repeat(first, count) + count_up(count))
        owners.append(np.repeat(np.arange(len(count)), count))

    for size in sizes[:-1]:
        head = np.minimum(-left % BLOCK_RANKS, right - left)
        take(left, head)
        left = left + head
        tail = (right - left) % BLOCK_RANKS
        take(right - tail, tail)
        left, right, start = left // BLOCK_RANKS, (right - tail) // BLOCK_RANKS, start + size
    take(left, right - left)
    owner = np.concatenate(owners)
    by_range = np.argsort(owner, kind="stable")
    return np.concatenate(places)[by_range], np.bincount(owner, minlength=len(begin))


class BagKernel(DeviceKernel):
    """The kernel for devices that uses :class:`Bags`. In the tensors that it returns, the rows are
    interleaved: the nodes of one row are not consecutive in memory."""

    plan: Bags

    def _prepare(self, order: Ints, nodes: Nodes) -> None:
        self.plan = plan = Bags.of(order, nodes)
        self._order = on_device(plan.order, self.device)
        self._inside = on_device(plan.inside, self.device)
        self._starts = on_device(plan.starts, self.device)
        ranks = np.argsort(plan.order)  # the rank of each position
        self._place = on_device(np.append(plan.place, ranks), self.device)

    def combine(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """See :class:`~genlm.core.trie.device.DeviceKernel`.

        Returns:
            ``[rows, nodes + items]``, a view of rows that lie side by side.
        """
        import torch

        rows, sizes, blocks = len(weights), self.plan.sizes, sum(self.plan.sizes)
        reduce = getattr(torch, operation.reduction)
        table = weights.new_empty(blocks + len(self.plan.starts), rows)
        table[: sizes[0]] = weights.t().index_select(0, self._order)
        start = 0
        for below, size in pairwise(sizes):
            whole = table[start : start + size * BLOCK_RANKS].view(size, BLOCK_RANKS, rows)
            start += below
            reduce(whole, 1, out=table[start : start + size])
        if len(self.plan.starts):
            mode = "sum" if operation is SUM else "max"
            bags = torch.nn.functional.embedding_bag
            table[blocks:] = bags(self._inside, table[:blocks], self._starts, mode=mode)
        return table.index_select(0, self._place).t()
