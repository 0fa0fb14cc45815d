"""The trie as a Graphviz drawing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from genlm.core.trie.excerpt import Drawn, excerpt

if TYPE_CHECKING:
    from genlm.core.trie.trie import TokenCharacterTrie


def draw_dot(trie: TokenCharacterTrie, ws: Any, max_nodes: int) -> Any:
    """A ``graphviz.Digraph``: circles for prefixes, double circles for items, greener where the
    weight is larger.

    :raises ImportError: the package graphviz is missing.
    """
    graphviz = _import_graphviz()
    dot = graphviz.Digraph(
        comment="Token Character Trie", graph_attr={"rankdir": "LR"}, node_attr={"style": "filled"}
    )
    for drawn in excerpt(trie, ws, max_nodes):
        shape = "circle" if drawn.item is None else "doublecircle"
        dot.node(
            str(drawn.node), graphviz.escape(_label(drawn)), shape=shape, fillcolor=_color(drawn)
        )
        if drawn.above is not None:
            edge = f"End-of-Token (position {drawn.item})" if drawn.edge is None else drawn.edge
            dot.edge(str(drawn.above), str(drawn.node), label=graphviz.escape(edge))
        if drawn.left_out:
            dot.node(f"more{drawn.node}", f"{drawn.left_out} more", shape="plaintext", style="")
            dot.edge(str(drawn.node), f"more{drawn.node}", style="dashed")
    return dot


def _label(drawn: Drawn) -> str:
    weight = [] if drawn.weight is None else [f"{drawn.weight:.4g}"]
    return "\n".join([str(drawn.node), f"'{drawn.prefix}'", *weight])


def _color(drawn: Drawn) -> str:
    faded = 255 if drawn.weight is None else round(255 * (1 - drawn.share))
    return f"#{faded:02x}ff{faded:02x}"


def _import_graphviz() -> Any:
    try:
        return importlib.import_module("graphviz")
    except ModuleNotFoundError as error:
        raise ImportError(
            'drawing a trie needs the package graphviz: pip install "genlm-core[visualize]"; or '
            'use format="html"'
        ) from error
