"""A trie one node at a time, without any array over all nodes; and as dictionaries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from genlm.core.errors import InvalidInputError
from genlm.core.trie.layout import Ints, Layout, Words
from genlm.core.trie.weights import FloatArray, Operation

# The key of an edge: a letter, or ``(None, position)`` to the leaf of an item.
Edge = Hashable


class Walker:
    """Finds nodes, what lies below them, and the weights of their children."""

    def __init__(self, words: Words, layout: Layout) -> None:
        self.words = words
        self.layout = layout

    def find(self, prefix: Iterable[Hashable]) -> int | None:
        """The node that ``prefix`` leads to; a binary search among siblings for each letter."""
        node = 0
        for letter in prefix:
            first, stop = self.layout.first_child[node : node + 2].tolist()
            siblings = self.layout.letter[first:stop]
            code = self._codes.get(letter, -1)
            index = int(np.searchsorted(siblings, code))
            if index == len(siblings) or siblings[index] != code:
                return None
            node = first + index
        return node

    def below(self, node: int) -> Ints:
        """The positions of the items below a node or leaf: a slice of ``words.order``.

        :raises InvalidInputError: there is no such node.
        """
        nodes, leaves = self.layout.size, len(self.words.order)
        if not 0 <= node < nodes + leaves:
            raise InvalidInputError(f"there is no node {node}: nodes are 0 to {nodes + leaves - 1}")
        if node < nodes:
            return self.words.order[self.layout.begin[node] : self.layout.end[node]]
        rank = self._rank_of_position[node - nodes]
        return self.words.order[rank : rank + 1]

    def children(self, operation: Operation, node: int, row: FloatArray) -> dict[Edge, float]:
        """What ``operation`` makes of the weights below each child, by edge."""
        below = self.below(node)
        if node >= self.layout.size:
            return {}
        weights = row[below].astype(np.float64)
        first, stop = self.layout.first_child[node : node + 2]
        starts = self.layout.begin[first:stop] - self.layout.begin[node]
        # Items that equal the node's prefix are first.
        ending = int(starts[0]) if len(starts) else len(below)
        combined = operation.of(np).reduceat(weights, starts) if len(starts) else np.empty(0)
        leaves = ((None, position) for position in below[:ending].tolist())
        letters = (self.words.alphabet[code] for code in self.layout.letter[first:stop])
        edges: list[Edge] = [*leaves, *letters]
        return dict(zip(edges, np.concatenate([weights[:ending], combined]).tolist(), strict=True))

    @cached_property
    def _codes(self) -> dict[Hashable, int]:
        return {letter: code for code, letter in enumerate(self.words.alphabet)}

    @cached_property
    def _rank_of_position(self) -> Ints:
        return np.argsort(self.words.order)


def children_view(words: Words, layout: Layout) -> list[dict[Hashable, int]]:
    """For each node its edges: letter to node, and ``(None, position)`` to leaf. Leaves have
    none."""
    children: list[dict[Hashable, int]] = [{} for _ in range(layout.size + len(words.order))]
    edges = zip(
        layout.parent[1:].tolist(), layout.letter[1:].tolist(), range(1, layout.size), strict=True
    )
    for parent, code, node in edges:
        children[parent][words.alphabet[code]] = node
    for position, node in zip(words.order.tolist(), layout.node_of_word.tolist(), strict=True):
        children[node][None, position] = layout.size + position
    return children


def prefixes_view(words: Words, layout: Layout) -> dict[int, list[Any]]:
    """For each node the letters that lead to it; a leaf has those of its item."""
    prefixes: dict[int, list[Any]] = {0: []}
    for node, (parent, code) in enumerate(
        zip(layout.parent[1:].tolist(), layout.letter[1:].tolist(), strict=True), 1
    ):
        prefixes[node] = [*prefixes[parent], words.alphabet[code]]
    for position, node in zip(words.order.tolist(), layout.node_of_word.tolist(), strict=True):
        prefixes[layout.size + position] = prefixes[node]
    return prefixes
