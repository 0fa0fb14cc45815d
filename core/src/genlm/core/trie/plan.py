"""How to sum or maximise over every node's words in a few dozen array operations.

Differences of prefix sums would be one operation, but they lose small masses to cancellation.
Instead, the words below each node are combined pair by pair, in rounds, for all nodes at once (see
:mod:`genlm.core.trie.pairing`). As only disjoint parts are ever combined, results are exact up to
rounding, for weights of any sign.

At least one value of each pair was made in the round before. So the results of a round are kept in
the order in which the next one takes them, and only the other value of each pair must be looked up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.trie.groups import Groups
from genlm.core.trie.layout import Layout
from genlm.core.trie.pairing import Pairing, Pairs
from genlm.core.trie.words import Ints

Indices = npt.NDArray[np.intp]


@frozen(eq=False)
class Round:
    """Pairs of values that are combined at once, in the work row.

    Attributes:
        new: Where the new values are, side by side.
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
        values: Where the values are: those of the first result, then those of the second, and so
            on.
        starts: ``[results]`` Where in ``values`` those of each result begin.
        results: Where the results go.
    """

    values: Indices
    starts: Indices
    results: slice


@frozen(eq=False)
class Plan:
    """What to combine with what, in a work row ``[width]``: the weights by position, then all
    results.

    Attributes:
        words: The number of weights.
        first: ``[pairs]`` The positions of the first round's new values: to be put where its
            results go.
        rounds: What to combine, one after the other.
        rest: What to combine after that.
        place: ``[nodes]`` Where in the work row each node's result is.
    """

    words: int
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
    def of(cls, order: Ints, layout: Layout) -> Plan:
        """Plan for the nodes of ``layout``; nodes with the same words below are computed once."""
        groups = Groups.of(layout)
        pairing = Pairing(order, groups)
        values, group = pairing.rest()
        made = len(order) + sum(len(pairs.new) for pairs in pairing.rounds)
        starts = np.flatnonzero(np.append(True, group[1:] != group[:-1])) if len(group) else group
        index = np.arange(made + len(starts))
        first, rounds = _arrange(pairing.rounds, len(order), index)
        rest = Rest(index[values].astype(np.intp), starts.astype(np.intp), slice(made, len(index)))
        place = order[layout.begin]  # of a node with a single word
        several = groups.of_node >= 0
        place[several] = index[pairing.result[groups.of_node[several]]]
        return cls(len(order), first, rounds, rest, place.astype(np.intp))


def _arrange(rounds: Sequence[Pairs], words: int, index: Ints) -> tuple[Indices, tuple[Round, ...]]:
    """The rounds, each with its results in the order in which the next one takes them.

    :param index: where each value is in the work row: itself, until it is changed here.
    """
    taken = np.empty(0, np.int64)
    stop = words + sum(len(pairs.new) for pairs in rounds)
    arranged: list[tuple[slice, Ints]] = []
    for pairs in reversed(rounds):
        results = slice(stop - len(pairs.new), stop)
        stop = results.start
        is_taken = np.zeros(len(pairs.new), bool)
        is_taken[taken - results.start] = True
        order = np.append(taken - results.start, np.flatnonzero(~is_taken))
        index[results.start + order] = np.arange(results.start, results.stop)
        arranged.append((results, pairs.other[order]))
        taken = pairs.new[order]
    start = words
    final = []
    for results, other in reversed(arranged):
        final.append(Round(slice(start, start + len(other)), index[other].astype(np.intp), results))
        start = results.start
    return taken.astype(np.intp), tuple(final)
