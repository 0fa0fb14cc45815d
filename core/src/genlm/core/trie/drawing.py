"""The trie for people: a Graphviz drawing, and a web page that needs nothing but a browser."""

from __future__ import annotations

import heapq
import importlib
import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from importlib.resources import files
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.errors import InvalidInputError, InvalidOptionError
from genlm.core.installation import CORE, pip_install
from genlm.core.trie.weights import to_array

Floats = npt.NDArray[np.float64]


class Drawable(Protocol):
    """What a drawing needs of a trie."""

    root: int
    decode: list[Any]

    def __len__(self) -> int: ...
    def weight_sum(self, ws: Any, dtype: Any = None) -> Any: ...
    @property
    def children(self) -> Sequence[Mapping[Hashable, int]]: ...
    @property
    def leaf2word(self) -> Mapping[int, Any]: ...
    @property
    def node2prefix(self) -> Mapping[int, Sequence[Hashable]]: ...


@frozen
class Drawn:
    """A node to draw.

    Attributes:
        node: Its number.
        above: The number of the node above it; ``None`` for the root.
        edge: The symbol on the edge from there, as text; ``None`` for the root and for leaves.
        prefix: The symbols that lead to it, as text.
        item: For a leaf, the position of its item.
        weight: Its weight; ``None`` if no weights were given.
        share: The length of its bar, from 0 to 1.
        left_out: How many of its children are not drawn.
    """

    node: int
    above: int | None
    edge: str | None
    prefix: str
    item: int | None
    weight: float | None
    share: float
    left_out: int


def excerpt(trie: Drawable, ws: Any, max_nodes: int) -> list[Drawn]:
    """At most ``max_nodes`` nodes: the root and what is connected to it, the heaviest first.

    Each node comes after the node above it.

    Args:
        trie: The trie.
        ws: ``[len(trie)]`` Weights by node, such as ``weight_sum`` gives; ``None`` counts the items
            below each node.
        max_nodes: The most nodes.

    Raises:
        InvalidInputError: ``ws`` has another shape.
        InvalidOptionError: ``max_nodes`` is less than 1.
    """
    if max_nodes < 1:
        raise InvalidOptionError(f"max_nodes must be at least 1; got {max_nodes}")
    given = trie.weight_sum(np.ones(len(trie.decode))) if ws is None else ws
    weights = to_array(given).astype(np.float64)
    if weights.shape != (len(trie),):
        raise InvalidInputError(
            f"ws has the shape {list(weights.shape)}, but the trie has {len(trie)} nodes: give "
            "weights by node, such as weight_sum() returns"
        )
    edges = _heaviest(trie, weights, max_nodes)
    drawn = Counter(above for _, above, _ in edges)
    shares = _shares(weights)
    return [
        Drawn(
            node=node,
            above=above,
            edge=None if above is None or node in trie.leaf2word else read([edge]),
            prefix=read(trie.node2prefix[node]),
            item=edge[1] if isinstance(edge, tuple) and node in trie.leaf2word else None,
            weight=None if ws is None else float(weights[node]),
            share=float(shares[node]),
            left_out=len(trie.children[node]) - drawn[node],
        )
        for node, above, edge in edges
    ]


def read(symbols: Sequence[Hashable]) -> str:
    """Symbols as text: bytes as UTF-8, other symbols as they are.

    Bytes that are not UTF-8 and characters that do not print are escaped.
    """
    if all(isinstance(symbol, int) and 0 <= symbol < 256 for symbol in symbols):
        text = bytes(symbols).decode("utf-8", "backslashreplace")  # type: ignore[arg-type]
    else:
        text = "".join(map(str, symbols))
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _heaviest(
    trie: Drawable, weights: Floats, limit: int
) -> list[tuple[int, int | None, Hashable]]:
    """Starting at the root, always the heaviest node in reach: (node, node above, edge)."""
    found: list[tuple[int, int | None, Hashable]] = []
    # The node's number settles ties, so that the drawing is the same every time.
    reach: list[tuple[float, int, int | None, Hashable]] = [(0.0, trie.root, None, None)]
    while reach and len(found) < limit:
        _, node, above, edge = heapq.heappop(reach)
        found.append((node, above, edge))
        for symbol, child in trie.children[node].items():
            heapq.heappush(reach, (-weights[child], child, node, symbol))
    return found


def _shares(weights: Floats) -> Floats:
    """Weights in proportion to the largest; if some are negative, from the least to the largest."""
    finite = weights[np.isfinite(weights)]
    low = min(float(finite.min(initial=0.0)), 0.0)
    high = float(finite.max(initial=low))
    bounded = np.nan_to_num(weights, nan=low, neginf=low, posinf=high)
    return (bounded - low) / ((high - low) or 1.0)


def draw_dot(trie: Drawable, ws: Any, max_nodes: int) -> Any:
    """Draw a ``graphviz.Digraph``: circles for prefixes, double circles for items. Larger weights
    are greener.

    Raises:
        ImportError: The package graphviz is missing.
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
            "drawing a trie needs the package graphviz: "
            f'{pip_install(CORE, "visualize")}; or use format="html"'
        ) from error


def draw_page(trie: Drawable, ws: Any, max_nodes: int) -> str:
    """Write an HTML document: a tree to open and close, a bar for each weight, and a search among
    its prefixes."""
    drawn = excerpt(trie, ws, max_nodes)
    template = files("genlm.core.trie").joinpath("page.html").read_text(encoding="utf-8")
    # So that no "<" in the data can end the script element that holds it.
    data = json.dumps(_columns(drawn), ensure_ascii=False, separators=(",", ":"))
    return template.replace("/*DATA*/", data.replace("<", "\\u003c"))


def _columns(drawn: list[Drawn]) -> dict[str, Any]:
    """The nodes by column, numbered in the order drawn. Children come after their parent, the
    heaviest first."""
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
