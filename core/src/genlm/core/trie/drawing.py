"""The trie as text, for people."""

from __future__ import annotations

import heapq
from collections.abc import Container, Hashable, Mapping, Sequence
from typing import Any

from genlm.core.checks import integer
from genlm.core.trie.weights import FloatArray


def draw(
    children: Sequence[Mapping[Hashable, int]],
    prefixes: Mapping[int, Sequence[Hashable]],
    leaves: Container[int],
    weights: FloatArray,
    max_nodes: int,
) -> str:
    """The heaviest part of a trie: from the root, node 0, always the heaviest node in reach.

    Args:
        children: The edges of each node.
        prefixes: The symbols that lead to each node.
        leaves: Which nodes are leaves.
        weights: ``[len(children)]`` Weights by node.
        max_nodes: The most nodes.

    Raises:
        InvalidOptionError: ``max_nodes`` is not an integer of at least 1.
    """
    max_nodes = integer("max_nodes", max_nodes, least=1)
    drawn: set[int] = set()
    reach = [(0.0, 0)]
    while reach and len(drawn) < max_nodes:
        _, node = heapq.heappop(reach)
        drawn.add(node)
        for child in children[node].values():
            heapq.heappush(reach, (-float(weights[child]), child))
    lines = []
    left: list[tuple[int, int, Any]] = [(0, 0, None)]
    while left:
        node, depth, edge = left.pop()
        label = f"item {edge[1]}" if node in leaves else repr(read(prefixes[node]))
        below = [(child, depth + 1, edge) for edge, child in children[node].items()]
        shown = [child for child in below if child[0] in drawn]
        shown.sort(key=lambda child: (weights[child[0]], -child[0]))
        more = f"  ({len(below) - len(shown)} more below)" * (len(shown) < len(below))
        lines.append(f"{weights[node]:10.4g}  {'  ' * depth}{label}{more}")
        left += shown
    return "\n".join(lines)


def read(symbols: Sequence[Hashable]) -> str:
    """Symbols as text: bytes as UTF-8, with escapes where they are none; others as they are."""
    if all(isinstance(symbol, int) and 0 <= symbol < 256 for symbol in symbols):
        return bytes(symbols).decode("utf-8", "backslashreplace")  # type: ignore[arg-type]
    return "".join(map(str, symbols))
