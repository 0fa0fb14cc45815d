"""The trie."""

import warnings
from collections.abc import Collection
from typing import Any, Self

import genlm.core.trie
from genlm.core import Token as Token


class TokenCharacterTrie(genlm.core.trie.TokenCharacterTrie):
    """The core's trie, with the warning of 0.3 where it is given plain bytes."""

    # The warning is given in __new__ and not in __init__: from here the caller is one frame away,
    # even with a subclass, which may have arguments of its own.
    def __new__(cls, *arguments: Any, **options: Any) -> Self:
        decode = arguments[0] if arguments else options.get("decode")
        if isinstance(decode, Collection) and any(map(Token.is_plain_bytes, decode)):
            warnings.warn(
                f"{cls.__name__} over plain bytes is deprecated since genlm-backend 0.3; give it "
                "the tokens that decode_vocab(tokenizer) returns",
                DeprecationWarning,
                stacklevel=2,
            )
        return super().__new__(cls)

    def mass_sum(self, p_llm: Any) -> Any:
        """The older name of :meth:`weight_sum`."""
        return self.weight_sum(p_llm)

    def batch_mass_sum(self, p_llms: Any) -> Any:
        """The older name of :meth:`batch_weight_sum`."""
        return self.batch_weight_sum(p_llms)

    def visualize(self, ws: Any = None) -> Any:
        """A ``graphviz.Digraph`` of all nodes, the heavier the greener; of a large trie, use
        :meth:`draw`.

        Args:
            ws: ``[len(self)]`` Weights by node, such as ``weight_sum`` gives.

        Raises:
            ValueError: ``ws`` has another length.
            ImportError: The package graphviz is missing.
        """
        try:
            import graphviz
        except ModuleNotFoundError as error:
            raise ImportError("to visualize a trie: pip install graphviz; or use draw()") from error
        if ws is not None and len(ws) != len(self):
            raise ValueError(f"ws must have {len(self)} weights, one for each node; got {len(ws)}")
        heaviest = 0.0 if ws is None else max(map(float, ws))
        dot = graphviz.Digraph("trie", graph_attr={"rankdir": "LR"}, node_attr={"style": "filled"})
        for node, prefix in self.node2prefix.items():
            label, faded = f"{node}\n{prefix}", 255
            if ws is not None:
                label += f"\n{float(ws[node]):.4f}"
                faded = round(255 * (1 - max(float(ws[node]) / (heaviest or 1.0), 0.0)))
            shape = "doublecircle" if node in self.leaf2word else "circle"
            color = f"#{faded:02x}ff{faded:02x}"
            dot.node(str(node), graphviz.escape(label), shape=shape, fillcolor=color)
        for node, children in enumerate(self.children):
            for edge, child in children.items():
                label = f"End-of-Token {edge[1]}" if child in self.leaf2word else str(edge)
                dot.edge(str(node), str(child), label=graphviz.escape(label))
        return dot
