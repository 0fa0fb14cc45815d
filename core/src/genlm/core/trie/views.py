"""The trie as dictionaries, for those who walk it in Python."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from genlm.core.trie.layout import Layout
from genlm.core.trie.words import Words


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
