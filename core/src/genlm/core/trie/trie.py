"""TokenCharacterTrie, the class that users create."""

from __future__ import annotations

import heapq
import operator
from collections.abc import Hashable, Iterable, Iterator
from functools import cached_property
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from genlm.core.checks import integer, safe_repr
from genlm.core.errors import InvalidInputError, VocabularyItemError
from genlm.core.hints import TRIE, missing_attribute
from genlm.core.tokenization.token import Token
from genlm.core.trie.cpu import CpuKernel
from genlm.core.trie.device import DeviceKernel
from genlm.core.trie.drawing import draw
from genlm.core.trie.nodes import Nodes, SortedItems, key_of
from genlm.core.trie.weights import (
    MAX,
    SUM,
    FloatArray,
    Operation,
    ResultType,
    check_shape,
    check_summed,
    to_array,
)


class TokenCharacterTrie:
    """A trie over the symbols of a vocabulary's items. It sums or maximises weights over all items
    below each node.

    Nodes are ``0..len(trie)-1``. Every item has a leaf of its own below the node of its last
    symbol, so items with the same symbols have different leaves. Weights are given by position:
    ``ws[i]`` belongs to ``decode[i]``.

    Args:
        decode: The vocabulary: tokens, bytes, str or any hashable iterables of hashable symbols.
            They may be mixed, and an end-of-sequence object may yield itself. The symbols of bytes
            are ints.
        device: The PyTorch device that computes, for instance ``"cuda"``. With ``"cpu"``, the
            default, NumPy computes. (With ``"cpu:0"`` PyTorch does, as on an accelerator.)

    Raises:
        VocabularyError: ``decode`` is empty, or an item occurs twice.
        VocabularyItemError: An item is not iterable or not hashable (a ``TypeError``).
        InvalidOptionError: PyTorch does not know the device, or cannot use it here.

    Attributes:
        decode: The items.
        device: The device that computes.
        root: The node of the empty prefix, where a walk along :attr:`children` starts.

    Examples:
        >>> trie = TokenCharacterTrie([b"the", b"then", b"a"])
        >>> sums = trie.weight_sum([0.5, 0.25, 0.25])
        >>> float(sums[trie.find(b"th")])
        0.75
        >>> trie.mass(np.log([0.5, 0.25, 0.25]), b"zzz")
        0.0

        A walk from the root, and the item that ends at node 1:

        >>> trie = TokenCharacterTrie([b"a", b"ab"])
        >>> trie.children[trie.root]
        {97: 1}
        >>> trie.children[1]
        {98: 2, (None, 0): 3}
    """

    #: The kernel for devices. The alternative is :class:`~genlm.core.trie.bags.BagKernel`; the
    #: figures of ``nox -s gpu`` decide between them.
    _device_kernel: ClassVar[type[DeviceKernel]] = DeviceKernel

    def __init__(self, decode: Iterable[Any], device: str | None = None) -> None:
        if isinstance(decode, str | bytes) or not isinstance(decode, Iterable):
            raise VocabularyItemError(
                "a trie needs the items of a vocabulary, for instance lm.byte_vocab; "
                f"got {safe_repr(decode)}"
            )
        self.decode = list(decode)  # a copy, because the caller may change the original
        self.device = "cpu" if device is None else str(device)
        self.root = 0
        self._items = SortedItems.of(self.decode)
        self.nodes = Nodes.of(self._items)
        order = self._items.order
        self._kernel = (
            CpuKernel(order, self.nodes)
            if self.device == "cpu"
            else self._device_kernel(order, self.nodes, self.device)
        )

    if not TYPE_CHECKING:  # a type checker must report every missing attribute

        def __getattr__(self, name):
            raise missing_attribute(self, name, TRIE)

    def __len__(self) -> int:
        """The number of nodes, leaves included."""
        return self.nodes.size + len(self._items.order)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.decode, self.device)

    # --- all nodes at once ------------------------------------------------------------------------

    def weight_sum(self, ws: Any, dtype: Any = None) -> Any:
        """The sum of the weights of all items below each node.

        Sums add disjoint parts and never subtract, so small masses keep their precision: for
        weights that are not negative, the relative rounding error of each sum grows only with the
        logarithm of the number of items. NumPy computes in float64. An accelerator computes in
        float32, with a relative error below 2e-6 for today's vocabularies, or in float64 if
        ``dtype`` asks for it. (MPS has no float64.)

        On an accelerator, a tensor is returned without waiting for the device.

        Args:
            ws: ``[len(decode)]`` Weights, by position: a NumPy array or PyTorch tensor of any float
                dtype on any device, or a list. They may have any sign, but weights of which none is
                positive and one is negative are rejected, because they look like log-probabilities.
                (On an accelerator this is checked only if the result is an array, because the check
                must wait for the device.)
            dtype: What to return: ``np.float64`` or ``np.float32`` for an array; ``torch.float64``
                or ``torch.float32`` for a tensor on the trie's device. The default is
                ``np.float64``, and ``np.float32`` on an accelerator.

        Returns:
            ``[len(trie)]`` Sums by node.

        Raises:
            InvalidInputError: ``ws`` has another shape, or holds log-probabilities.
            InvalidOptionError: ``dtype`` is not one of these.
        """
        return self._reduce(SUM, ws, dtype, batch=False)[0]

    def weight_max(self, ws: Any, dtype: Any = None) -> Any:
        """The largest weight of the items below each node. Weights may have any sign, so they may
        be log-probabilities. Arguments and result are those of :meth:`weight_sum`."""
        return self._reduce(MAX, ws, dtype, batch=False)[0]

    def batch_weight_sum(self, ws: Any, dtype: Any = None) -> Any:
        """:meth:`weight_sum` of each row of ``ws``: ``[rows, len(decode)]``, or a list of rows.

        Returns:
            ``[rows, len(trie)]``
        """
        return self._reduce(SUM, ws, dtype, batch=True)

    def batch_weight_max(self, ws: Any, dtype: Any = None) -> Any:
        """:meth:`weight_max` of each row of ``ws``; see :meth:`batch_weight_sum`."""
        return self._reduce(MAX, ws, dtype, batch=True)

    def _reduce(self, operation: Operation, ws: Any, dtype: Any, batch: bool) -> Any:
        wanted = ResultType.of(dtype, default=self._kernel.precision)
        result = self._kernel.reduce(operation, ws, batch, wanted)
        if operation is SUM and (not wanted.tensor or result.device.type == "cpu"):
            for place in np.flatnonzero(np.asarray(result[:, self.root]) < 0).tolist():
                check_summed(to_array(ws[place] if batch else ws))
        return result

    # --- one node at a time -----------------------------------------------------------------------

    def find(self, prefix: Iterable[Hashable]) -> int | None:
        """The node that ``prefix`` leads to; ``None`` if no item begins with it. Makes one binary
        search among siblings for each symbol.

        Check for ``None`` before you index with it: ``sums[None]`` is the whole array. For a
        model's row use :meth:`mass`.

        Raises:
            InvalidInputError: the symbols are bytes, but ``prefix`` is a str or has token ids.
        """
        if self._items.is_bytes and not isinstance(prefix, bytes | bytearray):
            given, prefix = prefix, [*prefix] if isinstance(prefix, Iterable) else [None]
            if not all(isinstance(each, Integral) and 0 <= each < 256 for each in prefix):
                raise InvalidInputError(
                    f"the symbols of this trie are bytes; got the {type(given).__name__} "
                    f"{given!r:.80}: encode a text with .encode(), or take a token's byte_string"
                )
        node = self.root
        for symbol in prefix:
            child = self.nodes.child(node, self._codes.get(symbol, -1))
            if child is None:
                return None
            node = child
        return node

    def mass(self, row: Any, prefix: Iterable[Hashable], special: bool = False) -> float:
        """The probability that the next item begins with ``prefix``; 0.0 if no item does.

        This is the probability of the next *token*. Several shorter tokens together may also begin
        with ``prefix``: :func:`~genlm.core.next_bytes.next_bytes_logprob` counts those too.

        Args:
            row: ``[len(decode)]`` Log-probabilities, such as a model's row.
            prefix: The first symbols.
            special: Whether special tokens count. Their bytes are names, such as ``<|im_end|>``,
                and not text.

        Raises:
            InvalidInputError: ``row`` has another shape or does not hold log-probabilities, or the
                symbols are bytes and ``prefix`` is a str or has token ids.
        """
        with np.errstate(under="ignore"):  # the program may have set NumPy to raise on underflow
            probabilities = np.exp(self._row(row), dtype=np.float64)
        total = float(probabilities.sum())
        if not total < 1.01:  # also true for NaN
            raise InvalidInputError(
                f"row must be log-probabilities, but the probabilities sum to {total:.6g}; give "
                "the model's row itself, without exp()"
            )
        node = self.find(prefix)
        if node is None:
            return 0.0
        below = self.positions_under(node)
        return float(probabilities[below if special else below[~self.is_special[below]]].sum())

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """``[len(decode)]`` The positions of all items, sorted by their symbols. Read only."""
        return self._items.order

    def positions_under(self, node: int) -> npt.NDArray[np.int64]:
        """The positions of the items below ``node``: for a vocabulary, their token ids.

        Takes constant time. For a node that is not a leaf, the result is a slice of
        :attr:`positions`.

        Raises:
            InvalidInputError: There is no such node.
        """
        if not (hasattr(node, "__index__") and 0 <= node < len(self)):
            raise InvalidInputError(f"there is no node {node!r}: nodes are 0 to {len(self) - 1}")
        if node >= self.nodes.size:
            return np.array([node - self.nodes.size])
        return self._items.order[self.nodes.begin[node] : self.nodes.end[node]]

    def children_sum(self, node: int, ws: Any) -> dict[Any, float]:
        """The sum of the weights below each child of ``node``, by the keys of ``children[node]``.

        Takes time in proportion to the items below ``node``. So a walk from the root down costs
        little more than its first step.

        Args:
            node: A node.
            ws: One vector of weights, as for :meth:`weight_sum`.

        Raises:
            InvalidInputError: ``ws`` has another shape or holds log-probabilities, or there is no
                such node.
        """
        return self._children(SUM, node, ws)

    def children_max(self, node: int, ws: Any) -> dict[Any, float]:
        """The largest weight below each child of ``node``. Arguments and cost are those of
        :meth:`children_sum`."""
        return self._children(MAX, node, ws)

    def heaviest_children(self, node: int, ws: Any, k: int) -> list[tuple[Any, float]]:
        """The ``k`` children of ``node`` with the largest sums, the heaviest first.

        Costs as much as :meth:`children_sum`.

        Returns:
            Pairs of a key of ``children[node]`` and its sum.
        """
        children, most = self.children_sum(node, ws), integer("k", k, least=0)
        return heapq.nlargest(most, children.items(), key=operator.itemgetter(1))

    @cached_property
    def is_special(self) -> npt.NDArray[np.bool_]:
        """``[len(decode)]`` Whether each item is a special token."""
        return np.array([isinstance(item, Token) and item.is_special for item in self.decode])

    def _children(self, operation: Operation, node: int, ws: Any) -> dict[Any, float]:
        row, below = self._row(ws), self.positions_under(node)
        if node >= self.nodes.size:
            return {}
        weights = row[below].astype(np.float64)
        if operation is SUM and weights.sum() < 0:
            check_summed(weights)
        children, ending = self.nodes.children(node), self.nodes.ending(node)
        starts = self.nodes.begin[children] - self.nodes.begin[node]
        combined = operation.of(np).reduceat(weights, starts)
        leaves = ((None, position) for position in below[:ending].tolist())
        edges = [*leaves, *map(self._items.alphabet.__getitem__, self.nodes.symbol[children])]
        return dict(zip(edges, [*weights[:ending].tolist(), *combined.tolist()], strict=True))

    def _row(self, ws: Any) -> FloatArray:
        row = to_array(ws)
        check_shape(row.shape, len(self.decode))
        return row

    @cached_property
    def _codes(self) -> dict[Hashable, int]:
        return {symbol: code for code, symbol in enumerate(self._items.alphabet)}

    # --- as dictionaries, built when first used ---------------------------------------------------

    @cached_property
    def children(self) -> list[dict[Any, int]]:
        """The edges of each node: symbol to node, and ``(None, position)`` to the leaf of an item.

        A walk from :attr:`root` along these edges reaches any node, and the leaves of the items
        that end there. A leaf has no edges.
        """
        children: list[dict[Any, int]] = [{} for _ in range(len(self))]
        for node, parent, symbol in self._edges():
            children[parent][symbol] = node
        for position, node in self._ends():
            children[node][None, position] = self.nodes.size + position
        return children

    @cached_property
    def word2leaf(self) -> dict[Any, int]:
        """The leaf of every item. The key of a token is ``(byte_string, token_id)``, that of
        another item the item itself."""
        return {
            key_of(item): self.nodes.size + position for position, item in enumerate(self.decode)
        }

    @cached_property
    def idx_to_leaf(self) -> npt.NDArray[np.int64]:
        """``[len(decode), 2]`` The position of every item, and its leaf. Items with equal symbols
        have a leaf each."""
        positions = np.arange(len(self.decode))
        return np.stack([positions, self.nodes.size + positions], axis=1)

    @cached_property
    def leaf2word(self) -> dict[int, Any]:
        """The inverse of :attr:`word2leaf`."""
        return {leaf: item for item, leaf in self.word2leaf.items()}

    @cached_property
    def node2prefix(self) -> dict[int, list[Any]]:
        """The symbols that lead to each node, leaves included."""
        prefixes: dict[int, list[Any]] = {self.root: []}
        for node, parent, symbol in self._edges():
            prefixes[node] = [*prefixes[parent], symbol]
        for position, node in self._ends():
            prefixes[self.nodes.size + position] = prefixes[node]
        return prefixes

    def _edges(self) -> Iterator[tuple[int, int, Hashable]]:
        """Each node but the root, the node above it, and the symbol between them."""
        above = zip(self.nodes.parent[1:].tolist(), self.nodes.symbol[1:].tolist(), strict=True)
        for node, (parent, code) in enumerate(above, 1):
            yield node, parent, self._items.alphabet[code]

    def _ends(self) -> Iterable[tuple[int, int]]:
        """The position of each item, and the node at which it ends."""
        return zip(self.positions.tolist(), self.nodes.node_of_item.tolist(), strict=True)

    # --- for people -------------------------------------------------------------------------------

    def draw(self, ws: Any = None, max_nodes: int = 40) -> str:
        """The trie as text, one node per line with its weight. Of a large trie, only the heaviest
        part is drawn.

        Args:
            ws: ``[len(trie)]`` Weights by node, such as :meth:`weight_sum` gives. Without weights,
                a node's weight is the number of items below it.
            max_nodes: The most nodes to draw.

        Raises:
            InvalidInputError: ``ws`` has another shape.
            InvalidOptionError: ``max_nodes`` is not an integer of at least 1.

        Examples:
            >>> trie = TokenCharacterTrie([b"a", b"ab"])
            >>> print(trie.draw(trie.weight_sum([0.25, 0.75])))
                     1  ''
                     1    'a'
                  0.75      'ab'
                  0.75        item 1
                  0.25      item 0
        """
        given = self.weight_sum(np.ones(len(self.decode))) if ws is None else ws
        weights = to_array(given)
        if weights.shape != (len(self),):
            raise InvalidInputError(
                f"ws has the shape {list(weights.shape)}, but the trie has {len(self)} nodes: give "
                "weights by node, such as weight_sum() returns"
            )
        return draw(self._edges_of, self.nodes.size, weights, max_nodes)

    def _edges_of(self, node: int) -> list[tuple[Any, int]]:
        """The edges of a node, as in :attr:`children`, without making those of all nodes."""
        if node >= self.nodes.size:
            return []
        below = self.nodes.children(node)
        symbols = map(self._items.alphabet.__getitem__, self.nodes.symbol[below].tolist())
        ending = self.positions_under(node)[: self.nodes.ending(node)].tolist()
        leaves = [((None, position), self.nodes.size + position) for position in ending]
        return [*zip(symbols, range(below.start, below.stop), strict=True), *leaves]


class ParallelTokenCharacterTrie(TokenCharacterTrie):
    """A :class:`TokenCharacterTrie` that computes on the machine's accelerator.

    Args:
        decode: The vocabulary.
        device: A PyTorch device; ``None`` is CUDA or MPS if the machine has one, otherwise the CPU.

    Raises:
        InvalidOptionError: PyTorch does not know the device, or cannot use it here.
    """

    def __init__(self, decode: Iterable[Any], device: str | None = None) -> None:
        super().__init__(decode, best_device() if device is None else device)


def best_device() -> str:
    """The accelerator that PyTorch can use, otherwise ``"cpu"``."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
