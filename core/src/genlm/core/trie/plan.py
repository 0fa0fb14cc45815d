"""How to sum or maximise over the items below every node, in a few dozen array operations.

Differences of prefix sums would take one operation, but cancellation destroys small masses.
Instead, the items below each node are combined pair by pair, in rounds, for all nodes at once (see
:class:`Pairing`). Only disjoint parts are ever combined. So results are exact up to rounding, for
weights of any sign, and the rounding error grows with the logarithm of the number of items.

At least one value of each pair was made in the round before. So the results of a round are stored
in the order in which the next round takes them. Only the other value of a pair must be looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.nodes import Ints, Nodes


@frozen(eq=False)
class Groups:
    """The sets of two or more items that lie below some node.

    Groups are nested: each is the union of smaller groups and single items. Nodes with the same
    items below share a group.

    Attributes:
        of_node: ``[nodes]`` The group below each node; -1 where there is only one item.
        of_item: ``[items]`` The smallest group with the item of each rank; -1 for an item
            that is in none.
        above: ``[groups]`` The smallest group that holds each group and more; -1 for the one that
            holds all.
    """

    of_node: Ints
    of_item: Ints
    above: Ints

    def __len__(self) -> int:
        return len(self.above)

    @classmethod
    def of(cls, nodes: Nodes) -> Groups:
        """Find the groups of a trie's nodes."""
        several = np.flatnonzero(nodes.end - nodes.begin > 1)
        keys = nodes.begin[several] * (int(nodes.end.max()) + 1) + nodes.end[several]
        _, uppermost, group = np.unique(keys, return_index=True, return_inverse=True)
        of_node = np.full(nodes.size, -1)
        of_node[several] = group
        parent = nodes.parent[several[uppermost]]
        return cls(of_node, _above_items(nodes, of_node), np.where(parent < 0, -1, of_node[parent]))


def _above_items(nodes: Nodes, of_node: Ints) -> Ints:
    """``[items]`` The smallest group with each item: that of the lowest node above it that has
    one."""
    node = nodes.node_of_item.copy()
    climbing = np.flatnonzero(of_node[node] < 0)
    while len(climbing):
        node[climbing] = nodes.parent[node[climbing]]
        climbing = climbing[(node[climbing] >= 0) & (of_node[node[climbing]] < 0)]
    return np.where(node < 0, -1, of_node[node])


# A round of fewer pairs takes as long as an empty one. So what is left then is combined at once.
_FEWEST_PAIRS = 100


#: The values that one round combines, ``[pairs]`` each: those made in the round before (in the
#: first round, items), and the other one of each pair, made in any round before.
Pairs = tuple[Ints, Ints]


class Pairing:
    """Combines the items of each group two by two, in rounds, in all groups at once.

    A group with a single value left is done, and passes it on to the group above. Values have
    numbers: first the items by position, then the results in the order made.

    Attributes:
        rounds: What is combined, one round after the other.
        result: ``[groups]`` The value that a group ends with; -1 while it is not done.
    """

    def __init__(self, order: Ints, groups: Groups) -> None:
        self.groups = groups
        self.rounds: list[Pairs] = []
        self.result = np.full(len(groups), -1)
        self._made = len(order)
        self._awaited = self._count(groups.above)  # groups below each that are not done
        grouped = groups.of_item >= 0
        # What can be combined now. Each group has at most one value from an earlier round; it comes
        # first.
        self._value, self._group = order[grouped], groups.of_item[grouped]
        while len(self._value):
            pair = self._pairs()
            if np.count_nonzero(pair) < _FEWEST_PAIRS:
                break
            self._combine(pair)

    def rest(self) -> tuple[Ints, Ints]:
        """End the groups that are not done yet.

        Returns:
            The values that these groups consist of, and the group of each, sorted by group. A value
            occurs once for each group that it belongs to, up to the one that holds all.
        """
        values, groups = [self._value], [self._group]
        while len(groups[-1]):
            above = self.groups.above[groups[-1]]
            values.append(values[-1][above >= 0])
            groups.append(above[above >= 0])
        value, group = np.concatenate(values), np.concatenate(groups)
        pending = np.flatnonzero(self.result < 0)
        self.result[pending] = self._made + np.arange(len(pending))
        order = np.argsort(group, kind="stable")
        return value[order], group[order]

    def _pairs(self) -> npt.NDArray[np.bool_]:
        """Sort the values by group.

        Returns:
            ``[values]`` Whether each value is the second of two, counted from the start of its
            group.
        """
        order = np.argsort(self._group, kind="stable")
        self._value, self._group = self._value[order], self._group[order]
        place = np.arange(len(order))
        begins = np.append(True, self._group[1:] != self._group[:-1])
        is_second: npt.NDArray[np.bool_] = (
            place - np.maximum.accumulate(np.where(begins, place, 0))
        ) % 2 == 1
        return is_second

    def _combine(self, is_second: npt.NDArray[np.bool_]) -> None:
        """Add a round, and pass on the results of the groups that are done."""
        second = np.flatnonzero(is_second)
        self.rounds.append((self._value[second], self._value[second - 1]))
        made, group = self._made + np.arange(len(second)), self._group[second]
        self._made += len(second)

        alone = ~is_second
        alone[second - 1] = False  # these are the first of two
        left = self._count(np.append(group, self._group[alone]))
        done = (left[group] == 1) & (self._awaited[group] == 0)
        self.result[group[done]] = made[done]
        group[done] = self.groups.above[group[done]]
        self._awaited -= self._count(group[done])
        kept = group >= 0
        self._value = np.append(self._value[alone], made[kept])
        self._group = np.append(self._group[alone], group[kept])

    def _count(self, group: Ints) -> Ints:
        """How often each group occurs."""
        return np.bincount(group[group >= 0], minlength=len(self.groups))


Indices = npt.NDArray[np.intp]


@frozen(eq=False)
class Round:
    """Pairs of values that are combined at once, in the work row.

    Attributes:
        new: Where the new values are, next to each other.
        other: ``[pairs]`` Where the other value of each pair is.
        results: Where the results go; in the first round, where the new values are.
    """

    new: slice
    other: Indices
    results: slice


@frozen(eq=False)
class Rest:
    """Results of more than two values each, in the work row.

    Attributes:
        values: Where the values are: those of the first result, then those of the second, ...
        starts: ``[results]`` Where in ``values`` those of each result begin.
        results: Where the results go.
    """

    values: Indices
    starts: Indices
    results: slice


@frozen(eq=False)
class Plan:
    """What to combine with what, in a *work row* ``[width]``.

    The work row holds the weights by position, then all results.

    Attributes:
        items: The number of weights.
        first: ``[pairs]`` The positions of the first round's new values. They are put where the
            first round finds them.
        rounds: What to combine, one after the other.
        rest: What to combine after that.
        place: ``[nodes]`` Where in the work row each node's result is.
    """

    items: int
    first: Indices
    rounds: tuple[Round, ...]
    rest: Rest
    place: Indices

    @property
    def nodes(self) -> int:
        """The number of nodes that have a result."""
        return len(self.place)

    @property
    def width(self) -> int:
        """The length of the work row."""
        return int(self.rest.results.stop)

    @classmethod
    def of(cls, order: Ints, nodes: Nodes) -> Plan:
        """Plan for the nodes of a trie. Nodes with the same items below are computed once.

        Args:
            order: ``[items]`` The position of the item of each rank.
            nodes: The nodes.
        """
        groups = Groups.of(nodes)
        pairing = Pairing(order, groups)
        values, group = pairing.rest()
        made = len(order) + sum(len(new) for new, _ in pairing.rounds)
        _, starts = np.unique(group, return_index=True)
        index = np.arange(made + len(starts))
        first, rounds = _arrange(pairing.rounds, len(order), index)
        rest = Rest(index[values].astype(np.intp), starts.astype(np.intp), slice(made, len(index)))
        place = order[nodes.begin]  # of a node with a single item
        several = groups.of_node >= 0
        place[several] = index[pairing.result[groups.of_node[several]]]
        return cls(len(order), first, rounds, rest, place.astype(np.intp))


def _arrange(rounds: Sequence[Pairs], items: int, index: Ints) -> tuple[Indices, tuple[Round, ...]]:
    """Place the results of each round in the order in which the next one takes them.

    The last round comes first: only it may keep its order.

    Args:
        rounds: What to combine, by the numbers of the values.
        items: The number of items.
        index: ``[values]`` Where each value is in the work row: at first, at its own number. The
            new places are written here.

    Returns:
        The positions of the first round's new values, and the rounds by places in the work row.
    """
    taken = np.empty(0, np.int64)
    stop = items + sum(len(new) for new, _ in rounds)
    arranged: list[tuple[slice, Ints]] = []
    for new, other in reversed(rounds):
        results = slice(stop - len(new), stop)
        stop = results.start
        is_taken = np.zeros(len(new), bool)
        is_taken[taken - results.start] = True
        order = np.append(taken - results.start, np.flatnonzero(~is_taken))
        index[results.start + order] = np.arange(results.start, results.stop)
        arranged.append((results, other[order]))
        taken = new[order]
    start = items
    final = []
    for results, other in reversed(arranged):
        final.append(Round(slice(start, start + len(other)), index[other].astype(np.intp), results))
        start = results.start
    return taken.astype(np.intp), tuple(final)
