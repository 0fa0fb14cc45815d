"""The trie as a web page that needs nothing but a browser."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from genlm.core.trie.excerpt import Drawn, excerpt

if TYPE_CHECKING:
    from genlm.core.trie.trie import TokenCharacterTrie


def draw_page(trie: TokenCharacterTrie, ws: Any, max_nodes: int) -> str:
    """An HTML document: a tree to open and close, a bar for each weight, and a search among all
    prefixes that it holds."""
    drawn = excerpt(trie, ws, max_nodes)
    template = files("genlm.core.trie").joinpath("page.html").read_text(encoding="utf-8")
    # No "<" can then end the script element that holds the data.
    data = json.dumps(_columns(drawn), ensure_ascii=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    return template.replace("/*DATA*/", data)


def _columns(drawn: list[Drawn]) -> dict[str, Any]:
    """The nodes by column, numbered in the order drawn; a node's children follow it, the heaviest
    first."""
    row = {node.node: i for i, node in enumerate(drawn)}
    return {
        "node": [node.node for node in drawn],
        "above": [-1 if node.above is None else row[node.above] for node in drawn],
        "edge": [node.edge for node in drawn],
        "prefix": [node.prefix for node in drawn],
        "item": [node.item for node in drawn],
        "weight": [None if node.weight is None else f"{node.weight:.4g}" for node in drawn],
        "share": [round(node.share, 4) for node in drawn],
        "leftOut": [node.left_out for node in drawn],
    }
