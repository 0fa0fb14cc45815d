"""The trie as text, for people."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from genlm.core.checks import integer
from genlm.core.trie.weights import FloatArray


def draw(
    edges: Callable[[int], Sequence[tuple[Any, int]]],
    first_leaf: int,
    weights: FloatArray,
    max_nodes: int,
) -> str:
    """The heaviest part of a trie: from the root, node 0, always the heaviest node in reach.

    Args:
        edges: Gives the edges of a node: the symbol and the node that it leads to, or ``(None,
            position)`` and the leaf of an item.
        first_leaf: The first leaf: nodes from here on have no edges.
        weights: Weights by node.
        max_nodes: The most nodes.

    Raises:
        InvalidOptionError: ``max_nodes`` is not an integer of at least 1.
    """
    max_nodes = integer("max_nodes", max_nodes, least=1)
    drawn: dict[int, Sequence[tuple[Any, int]]] = {}  # the drawn nodes, with the edges of each
    reach = [(0.0, 0)]
    while reach and len(drawn) < max_nodes:
        _, node = heapq.heappop(reach)
        drawn[node] = edges(node)
        for _, child in drawn[node]:
            heapq.heappush(reach, (-float(weights[child]), child))
    lines = []
    left: list[tuple[int, tuple[Any, ...], str]] = [(0, (), repr(""))]
    while left:
        node, prefix, label = left.pop()
        below = drawn[node]
        shown = [edge for edge in below if edge[1] in drawn]
        shown.sort(key=lambda edge: (weights[edge[1]], -edge[1]))
        more = f"  ({len(below) - len(shown)} more below)" * (len(shown) < len(below))
        lines.append(f"{weights[node]:10.4g}  {'  ' * len(prefix)}{label}{more}")
        for edge, child in shown:
            longer = (*prefix, edge)
            label = f"item {edge[1]}" if child >= first_leaf else repr(read(longer))
            left.append((child, longer, label))
    return "\n".join(lines)


def read(symbols: Sequence[Hashable]) -> str:
    """Symbols as text. Bytes are decoded as UTF-8, with escapes for invalid ones; other symbols
    stay as they are."""
    if all(isinstance(symbol, int) and 0 <= symbol < 256 for symbol in symbols):
        return bytes(symbols).decode("utf-8", "backslashreplace")  # type: ignore[arg-type]
    return "".join(map(str, symbols))
