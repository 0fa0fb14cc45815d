"""TokenCharacterTrie: what users hold."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Iterable
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.drawing import draw_dot, draw_page
from genlm.core.trie.kernels import CpuKernel
from genlm.core.trie.layout import Layout, Words, key_of
from genlm.core.trie.plan import Plan
from genlm.core.trie.walk import Walker, children_view, prefixes_view
from genlm.core.trie.weights import (
    MAX,
    SUM,
    FloatArray,
    Operation,
    ResultType,
    check_shape,
    to_array,
)


class TokenCharacterTrie:
    """A trie over the letters of a vocabulary's items, which sums or maximises weights over all
    items below each node.

    Nodes are ``0..len(trie)-1``. Every item has a leaf of its own below the node of its last
    letter, so items with the same letters have different leaves. Weights are given by position:
    ``ws[i]`` belongs to ``decode[i]``.

    :param decode: the vocabulary: tokens, bytes, str or any hashable iterables of hashable letters,
        mixed as you like; an end-of-sequence object may yield itself. The letters of bytes are
        ints.
    :param device: the PyTorch device that computes, for instance ``"cuda"``. On the CPU, the
        default, NumPy computes.
    :raises VocabularyError: ``decode`` is empty, or an item occurs twice.
    :raises InvalidOptionError: PyTorch knows no such device.
    """

    def __init__(self, decode: Iterable[Any], device: str | None = None) -> None:
        self.decode = list(decode)  # a list of its own, which nobody lengthens
        self.device = str(device or "cpu")
        self.root = 0
        self._words = Words.of(self.decode)
        self._layout = Layout.of(self._words)
        self._walker = Walker(self._words, self._layout)
        self._kernel = self._make_kernel(Plan.of(self._words.order, self._layout))

    def _make_kernel(self, plan: Plan) -> Any:
        if self.device == "cpu":
            return CpuKernel(plan)
        from genlm.core.trie.kernels import DeviceKernel

        return DeviceKernel(plan, self.device)

    def __len__(self) -> int:
        """The number of nodes, leaves included."""
        return self._layout.size + len(self._words.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.decode, self.device)

    # --- all nodes at once ------------------------------------------------------------------------

    def weight_sum(self, ws: Any, dtype: Any = None) -> Any:
        """For every node, the sum of the weights of all items below it.

        Parts are disjoint and only ever added, so small masses keep their precision. Computed in
        float64 (float32 on MPS).

        :param ws: ``[len(decode)]`` weights of any sign, by position: a NumPy array or PyTorch
            tensor of any float dtype on any device, or a list.
        :param dtype: what to return: ``np.float64`` (the default) or ``np.float32`` for an array;
            ``torch.float64`` or ``torch.float32`` for a tensor on the trie's device.
        :returns: ``[len(trie)]`` sums by node.
        :raises InvalidInputError: ``ws`` has another shape.
        :raises InvalidOptionError: ``dtype`` is another.
        """
        return self._reduce(SUM, ws, dtype, batch=False)[0]

    def weight_max(self, ws: Any, dtype: Any = None) -> Any:
        """For every node, the largest weight of the items below it; arguments and result as for
        :meth:`weight_sum`."""
        return self._reduce(MAX, ws, dtype, batch=False)[0]

    def batch_weight_sum(self, ws: Any, dtype: Any = None) -> Any:
        """:meth:`weight_sum` of each row of ``ws``: ``[rows, len(decode)]``, or a list of rows.

        :returns: ``[rows, len(trie)]``.
        """
        return self._reduce(SUM, ws, dtype, batch=True)

    def batch_weight_max(self, ws: Any, dtype: Any = None) -> Any:
        """:meth:`weight_max` of each row of ``ws``; see :meth:`batch_weight_sum`."""
        return self._reduce(MAX, ws, dtype, batch=True)

    def mass_sum(self, p_llm: Any) -> Any:
        """An older name of :meth:`weight_sum`."""
        return self.weight_sum(p_llm)

    def batch_mass_sum(self, p_llms: Any) -> Any:
        """An older name of :meth:`batch_weight_sum`."""
        return self.batch_weight_sum(p_llms)

    def _reduce(self, operation: Operation, ws: Any, dtype: Any, batch: bool) -> Any:
        wanted = ResultType.of(dtype)
        return self._kernel.reduce(operation, self._kernel.rows(ws, batch), wanted)

    # --- one node at a time -----------------------------------------------------------------------

    def find(self, prefix: Iterable[Hashable]) -> int | None:
        """The node that ``prefix`` leads to, or ``None``. Costs a binary search among siblings for
        each letter."""
        return self._walker.find(prefix)

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """``[len(decode)]`` The positions of all items, sorted by their letters. Read only."""
        return self._words.order

    def positions_under(self, node: int) -> npt.NDArray[np.int64]:
        """The positions of the items below ``node`` (the token ids, for a vocabulary): a slice of
        :attr:`positions`, O(1).

        :raises InvalidInputError: there is no such node.
        """
        return self._walker.below(node)

    def children_sum(self, node: int, ws: Any) -> dict[Any, float]:
        """The sums of the weights below each child of ``node``, by the keys of ``children[node]``.

        Costs time in proportion to the items below ``node``: a walk from the root down costs little
        more than its first step.

        :param ws: one vector of weights, as for :meth:`weight_sum`.
        :raises InvalidInputError: ``ws`` has another shape, or there is no such node.
        """
        return self._walker.children(SUM, node, self._row(ws))

    def children_max(self, node: int, ws: Any) -> dict[Any, float]:
        """The largest weight below each child of ``node``; arguments and cost as for
        :meth:`children_sum`."""
        return self._walker.children(MAX, node, self._row(ws))

    def heaviest_children(self, node: int, ws: Any, k: int) -> list[tuple[Any, float]]:
        """The ``k`` children of ``node`` with the largest sums, the heaviest first, as pairs of key
        and sum.

        Costs as much as :meth:`children_sum`.
        """
        children = self.children_sum(node, ws)
        return heapq.nlargest(k, children.items(), key=operator.itemgetter(1))

    def _row(self, ws: Any) -> FloatArray:
        row = to_array(ws)
        check_shape(row.shape, len(self.decode))
        return row

    # --- as dictionaries, built when first touched ------------------------------------------------

    @cached_property
    def children(self) -> list[dict[Hashable, int]]:
        """For each node its edges: letter to node, and ``(None, position)`` to the leaf of an item
        that ends there."""
        return children_view(self._words, self._layout)

    @cached_property
    def word2leaf(self) -> dict[Any, int]:
        """The leaf of every item: a token's under ``(byte_string, token_id)``, any other's under
        the item itself."""
        return {
            key_of(item): self._layout.size + position for position, item in enumerate(self.decode)
        }

    @cached_property
    def leaf2word(self) -> dict[int, Any]:
        """The inverse of :attr:`word2leaf`."""
        return {leaf: word for word, leaf in self.word2leaf.items()}

    @cached_property
    def node2prefix(self) -> dict[int, list[Any]]:
        """The letters that lead to each node, leaves included."""
        return prefixes_view(self._words, self._layout)

    # --- for people -------------------------------------------------------------------------------

    def visualize(
        self, ws: Any = None, format: str = "graphviz", max_nodes: int | None = None
    ) -> Any:
        """Draw the trie, or of a large one the part that weighs most.

        :param ws: ``[len(trie)]`` weights by node, such as :meth:`weight_sum` gives. Without them
            the nodes with the most items below are drawn.
        :param format: ``"graphviz"`` gives a ``graphviz.Digraph`` (needs the extra ``visualize``);
            ``"html"`` the text of a web page that can be opened, closed and searched, and needs
            nothing else.
        :param max_nodes: the most nodes to draw; by default 100, or 20,000 in a page.
        :raises InvalidInputError: ``ws`` has another shape.
        :raises InvalidOptionError: ``format`` or ``max_nodes`` is not accepted.
        :raises ImportError: the package graphviz is missing.
        """
        match format:
            case "graphviz":
                return draw_dot(self, ws, 100 if max_nodes is None else max_nodes)
            case "html":
                return draw_page(self, ws, 20_000 if max_nodes is None else max_nodes)
        raise InvalidOptionError(f"format is {format!r}: it must be 'graphviz' or 'html'")


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """A :class:`TokenCharacterTrie` that computes on the machine's accelerator.

    :param decode: the vocabulary.
    :param device: a PyTorch device; ``None`` is CUDA or MPS where there is one, else the CPU.
    :raises InvalidOptionError: PyTorch knows no such device.
    """

    def __init__(self, decode: Iterable[Any], device: str | None = None) -> None:
        super().__init__(decode, device or best_device())


def best_device() -> str:
    """The accelerator that PyTorch sees, else ``"cpu"``."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
