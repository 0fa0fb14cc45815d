"""The trie one node at a time, without an array over all nodes; and the trie as dictionaries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from genlm.core.errors import InvalidInputError
from genlm.core.trie.nodes import Ints, Nodes, SortedItems
from genlm.core.trie.weights import FloatArray, Operation

# The key of an edge: a symbol, or ``(None, position)`` to the leaf of an item.
Edge = Hashable


class Walker:
    """Finds nodes, the items below them, and the weights of their children."""

    def __init__(self, items: SortedItems, nodes: Nodes) -> None:
        self.items = items
        self.nodes = nodes

    def find(self, prefix: Iterable[Hashable]) -> int | None:
        """The node that ``prefix`` leads to, or ``None``. One binary search among siblings for each
        symbol.

        Raises:
            InvalidInputError: ``prefix`` is a str, but no item is.
        """
        if isinstance(prefix, str) and self.items.is_bytes:
            raise InvalidInputError(
                f"the symbols of this trie are bytes; got the str {prefix!r:.80}: encode it first, "
                "for instance with .encode()"
            )
        node = 0
        for symbol in prefix:
            child = self.child(node, self._codes.get(symbol, -1))
            if child is None:
                return None
            node = child
        return node

    def child(self, node: int, code: int) -> int | None:
        """The child of an inner node by the code of its symbol: for a byte, its value."""
        children = self.children_of(node)
        siblings = self.nodes.symbol[children]
        index = int(np.searchsorted(siblings, code))
        return children.start + index if code in siblings[index : index + 1] else None

    def children_of(self, node: int) -> slice:
        """Which nodes are the children of an inner node."""
        return slice(*self.nodes.first_child[node : node + 2].tolist())

    def ending(self, node: int) -> int:
        """How many items equal the prefix of an inner node. They come first below it."""
        starts = self.nodes.begin[self.children_of(node)]
        stop = starts[0] if len(starts) else self.nodes.end[node]
        return int(stop - self.nodes.begin[node])

    def below(self, node: int) -> Ints:
        """The positions of the items below a node or leaf: a slice of ``items.order``.

        Raises:
            InvalidInputError: There is no such node.
        """
        inner, leaves = self.nodes.size, len(self.items.order)
        if not 0 <= node < inner + leaves:
            raise InvalidInputError(f"there is no node {node}: nodes are 0 to {inner + leaves - 1}")
        if node < inner:
            return self.items.order[self.nodes.begin[node] : self.nodes.end[node]]
        rank = self._rank_of_position[node - inner]
        return self.items.order[rank : rank + 1]

    def children(self, operation: Operation, node: int, row: FloatArray) -> dict[Edge, float]:
        """The weights below each child, combined by ``operation``, by edge."""
        below = self.below(node)
        if node >= self.nodes.size:
            return {}
        weights = row[below].astype(np.float64)
        children, ending = self.children_of(node), self.ending(node)
        starts = self.nodes.begin[children] - self.nodes.begin[node]
        combined = operation.of(np).reduceat(weights, starts)
        leaves = ((None, position) for position in below[:ending].tolist())
        symbols = (self.items.alphabet[code] for code in self.nodes.symbol[children])
        edges: list[Edge] = [*leaves, *symbols]
        return dict(zip(edges, [*weights[:ending].tolist(), *combined.tolist()], strict=True))

    @cached_property
    def _codes(self) -> dict[Hashable, int]:
        return {symbol: code for code, symbol in enumerate(self.items.alphabet)}

    @cached_property
    def _rank_of_position(self) -> Ints:
        return np.argsort(self.items.order)


def children_view(items: SortedItems, nodes: Nodes) -> list[dict[Any, int]]:
    """The edges of each node: symbol to node, ``(None, position)`` to leaf. A leaf has none."""
    children: list[dict[Any, int]] = [{} for _ in range(nodes.size + len(items.order))]
    edges = zip(nodes.parent[1:].tolist(), nodes.symbol[1:].tolist(), strict=True)
    for node, (parent, code) in enumerate(edges, 1):
        children[parent][items.alphabet[code]] = node
    for position, node in zip(items.order.tolist(), nodes.node_of_item.tolist(), strict=True):
        children[node][None, position] = nodes.size + position
    return children


def prefixes_view(items: SortedItems, nodes: Nodes) -> dict[int, list[Any]]:
    """The symbols that lead to each node; a leaf has those of its item."""
    prefixes: dict[int, list[Any]] = {0: []}
    edges = zip(nodes.parent[1:].tolist(), nodes.symbol[1:].tolist(), strict=True)
    for node, (parent, code) in enumerate(edges, 1):
        prefixes[node] = [*prefixes[parent], items.alphabet[code]]
    for position, node in zip(items.order.tolist(), nodes.node_of_item.tolist(), strict=True):
        prefixes[nodes.size + position] = prefixes[node]
    return prefixes
