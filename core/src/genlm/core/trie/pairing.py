"""How the CPU sums or maximises over the items below every node, in a few dozen array operations.

The items below each node are combined two by two, in rounds, for all nodes at once; a node above
goes on from the results of those below it. So each weight is read once, which makes this the way
with the least work, in more and smaller steps than :mod:`genlm.core.trie.plan` has. Only disjoint
parts are ever combined. So results are exact up to rounding, for weights of any sign, and the
rounding error grows with the logarithm of the number of items.

At least one value of each pair was made in the round before. The results of a round are stored in
the order in which the next round takes them, so only the other value of a pair is looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.nodes import Ints, Nodes
from genlm.core.trie.plan import Indices

#: A round with fewer pairs takes as long as an empty one, so what is left then is combined at once.
MIN_PAIRS = 100


@frozen(eq=False)
class Round:
    """Pairs of values that are combined at once, in the work row.

    Attributes:
        new: The places of one value of each pair, which are consecutive.
        other: ``[pairs]`` The place of the other value of each pair.
        results: The places of the results. In the first round, they are the places of the new
            values.
    """

    new: slice
    other: Indices
    results: slice


@frozen(eq=False)
class Rest:
    """Results of more than two values each, in the work row.

    Attributes:
        values: The places of the values of the first result, then of the second, and so on.
        starts: ``[results]`` The index in ``values`` at which each result begins.
        results: The places of the results.
    """

    values: Indices
    starts: Indices
    results: slice


@frozen(eq=False)
class Pairing:
    """A plan of which values to combine, in a *work row* ``[width]`` with the weights by position,
    followed by all results.

    Attributes:
        items: The number of weights.
        first: ``[pairs]`` The positions of the first round's new values. They are copied to where
            the first round finds them.
        rounds: The rounds of pairs to combine, in order.
        rest: The values to combine after the rounds.
        place: ``[nodes]`` The place of each node's result in the work row.
    """

    items: int
    first: Indices
    rounds: Sequence[Round]
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
    def of(cls, order: Ints, nodes: Nodes) -> Pairing:
        """Plan for the nodes of a trie. Nodes with the same items below are computed once.

        Args:
            order: ``[items]`` The position of the item of each rank.
            nodes: The nodes.
        """
        groups = Groups.of(nodes)
        work = _Unfinished(order, groups)
        rounds = work.pair_up()
        values, group = work.rest()
        made = len(order) + sum(len(new) for new, _ in rounds)
        _, starts = np.unique(group, return_index=True)
        place_of = np.arange(made + len(starts))
        first, arranged = _arrange(rounds, len(order), place_of)
        place = order[nodes.begin]  # a node with one item has that item's place
        several = groups.of_node >= 0
        place[several] = place_of[work.result[groups.of_node[several]]]
        return cls(
            items=len(order),
            first=first,
            rounds=arranged,
            rest=Rest(
                place_of[values].astype(np.intp),
                starts.astype(np.intp),
                slice(made, len(place_of)),
            ),
            place=place.astype(np.intp),
        )


@frozen(eq=False)
class Groups:
    """The sets of two or more items that lie below some node.

    Groups are nested: each is the union of smaller groups and single items.

    Attributes:
        of_node: ``[nodes]`` The group below each node; -1 where there is only one item.
        of_item: ``[items]`` The smallest group with the item of each rank; -1 for an item that is
            in none.
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
        above = np.where(parent < 0, -1, of_node[parent])
        return cls(of_node, cls._of_items(nodes, of_node), above)

    @staticmethod
    def _of_items(nodes: Nodes, of_node: Ints) -> Ints:
        """The group of each item: the group of the lowest node above it that has one."""
        node = nodes.node_of_item.copy()
        climbing = np.flatnonzero(of_node[node] < 0)
        while len(climbing):
            node[climbing] = nodes.parent[node[climbing]]
            climbing = climbing[(node[climbing] >= 0) & (of_node[node[climbing]] < 0)]
        return np.where(node < 0, -1, of_node[node])


class _Unfinished:
    """The values of all groups that are not combined yet.

    A group with a single value left is finished, and passes it on to the group above. Values have
    numbers: first the items by position, then the results in the order made.

    Attributes:
        result: ``[groups]`` The value that a group ends with; -1 while it is not finished.
    """

    def __init__(self, order: Ints, groups: Groups) -> None:
        self.groups = groups
        self.result = np.full(len(groups), -1)
        self._made = len(order)
        # How many groups below each group are not finished.
        self._awaited = self._count(groups.above)
        grouped = groups.of_item >= 0
        # Each group has at most one value from an earlier round, and it comes first. So one value
        # of each pair was made in the previous round.
        self._value, self._group = order[grouped], groups.of_item[grouped]

    def pair_up(self) -> list[tuple[Ints, Ints]]:
        """Combine values until a round would have too few pairs: the new value of each pair of a
        round, made in the round before, and the other one."""
        rounds = []
        while len(second := self._seconds()) >= MIN_PAIRS:
            rounds.append((self._value[second], self._value[second - 1]))
            self._combine(second)
        return rounds

    def rest(self) -> tuple[Ints, Ints]:
        """Finish the groups that are left.

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
        left = np.flatnonzero(self.result < 0)
        self.result[left] = self._made + np.arange(len(left))
        by_group = np.argsort(group, kind="stable")
        return value[by_group], group[by_group]

    def _seconds(self) -> Ints:
        """Sort the values by group, and find those with an odd index in their group, which are the
        second of a pair."""
        by_group = np.argsort(self._group, kind="stable")
        self._value, self._group = self._value[by_group], self._group[by_group]
        place = np.arange(len(by_group))
        begins = np.append(True, self._group[1:] != self._group[:-1])
        start = np.maximum.accumulate(np.where(begins[: len(place)], place, 0))
        return np.flatnonzero((place - start) % 2 == 1)

    def _combine(self, second: Ints) -> None:
        """Replace each pair by its result, and pass the results of finished groups on to the groups
        above."""
        made, group = self._made + np.arange(len(second)), self._group[second]
        self._made += len(second)
        alone = np.ones(len(self._value), bool)
        alone[second] = alone[second - 1] = False
        left = self._count(np.append(group, self._group[alone]))
        finished = (left[group] == 1) & (self._awaited[group] == 0)
        self.result[group[finished]] = made[finished]
        group[finished] = self.groups.above[group[finished]]
        self._awaited -= self._count(group[finished])
        kept = group >= 0
        self._value = np.append(self._value[alone], made[kept])
        self._group = np.append(self._group[alone], group[kept])

    def _count(self, group: Ints) -> Ints:
        """How often each group occurs."""
        return np.bincount(group[group >= 0], minlength=len(self.groups))


def _arrange(
    rounds: Sequence[tuple[Ints, Ints]], items: int, place_of: npt.NDArray[np.int64]
) -> tuple[Indices, list[Round]]:
    """Place the results of each round in the order in which the next one takes them.

    The last round comes first: only it may keep its order.

    Args:
        rounds: The new and the other values of each round, by their numbers.
        items: The number of items.
        place_of: ``[values]`` Where each value is in the work row: at first, at its own number. The
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
        place_of[results.start + order] = np.arange(results.start, results.stop)
        arranged.append((results, other[order]))
        taken = new[order]
    start, final = items, []
    for results, other in reversed(arranged):
        new_values = slice(start, start + len(other))
        final.append(Round(new_values, place_of[other].astype(np.intp), results))
        start = results.start
    return taken.astype(np.intp), final
