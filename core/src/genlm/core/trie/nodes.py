"""The items of a trie and its shape: sorted items, nodes, and the items below each node."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.errors import VocabularyError, VocabularyItemError
from genlm.core.tokenization.token import Token

Ints = npt.NDArray[np.int64]


@frozen(eq=False)
class SortedItems:
    """The items of a trie as sequences of symbols, sorted.

    Attributes:
        order: ``[items]`` The position, in the order given, of the item with each rank.
        lengths: ``[items]`` The number of symbols of the item with each rank.
        symbols: The codes of all symbols, item after item by rank: uint8 or big-endian uint32.
        alphabet: The symbol of each code; codes below 256 are the values of bytes.
    """

    order: Ints
    lengths: Ints
    symbols: npt.NDArray[Any]
    alphabet: Sequence[Hashable]

    @property
    def is_bytes(self) -> bool:
        """Whether all items are bytes."""
        return isinstance(self.alphabet, range)

    @classmethod
    def of(cls, items: Sequence[Any]) -> SortedItems:
        """Read and sort the items.

        Raises:
            VocabularyError: There is no item, or one occurs twice.
            VocabularyItemError: An item is not a hashable iterable of hashable symbols.
        """
        if not items:
            raise VocabularyError("a trie needs at least one item; the vocabulary given is empty")
        alphabet, spelled, dtype = _spell(items)
        order = sorted(range(len(spelled)), key=spelled.__getitem__)
        in_order = [spelled[position] for position in order]
        _refuse_duplicates(items, in_order, order)
        positions = np.array(order, np.int64)
        positions.flags.writeable = False  # users get this array to read
        sizes = np.fromiter(map(len, spelled), np.int64, len(order))[positions]
        symbols = np.frombuffer(b"".join(in_order), dtype)
        return cls(positions, sizes // dtype.itemsize, symbols, alphabet)


def key_of(item: Any) -> Any:
    """The key of an item in ``word2leaf``: ``(byte_string, token_id)`` for a token, otherwise the
    item itself."""
    return (item.byte_string, item.token_id) if isinstance(item, Token) else item


def _spell(items: Sequence[Any]) -> tuple[Sequence[Hashable], list[bytes], np.dtype[Any]]:
    """Each item as bytes that sort like its symbols, with the symbols' alphabet and their width."""
    if all(isinstance(item, bytes) for item in items):
        return range(256), [bytes(item) for item in items], np.dtype(np.uint8)
    codes: dict[Hashable, int] = {byte: byte for byte in range(256)}
    spelled = [
        # Latin-1 and UTF-32 together turn each byte into a symbol of four bytes.
        bytes(item).decode("latin-1").encode("utf-32-be")
        if isinstance(item, bytes)
        else _spell_symbols(item, codes)
        for item in items
    ]
    return list(codes), spelled, np.dtype(">u4")


def _spell_symbols(item: Iterable[Hashable], codes: dict[Hashable, int]) -> bytes:
    try:
        hash(item)  # raises if the item is not hashable, since `word2leaf` needs it
        return np.array([codes.setdefault(symbol, len(codes)) for symbol in item], ">u4").tobytes()
    except TypeError as error:
        raise VocabularyItemError(
            f"{error}: the items of a trie must be Tokens, bytes, str or hashable iterables of "
            f"hashable symbols; got {item!r:.80}"
        ) from error


def _refuse_duplicates(
    items: Sequence[Any], in_order: Sequence[bytes], order: Sequence[int]
) -> None:
    """Reject an item that is given twice, because it would have two weights. Different tokens may
    have the same bytes."""
    seen: dict[Any, int] = {}
    like_the_one_before = map(operator.eq, in_order[1:], in_order)
    for before, position in compress(pairwise(order), like_the_one_before):
        seen.setdefault(key_of(items[before]), before)
        first = seen.setdefault(key_of(items[position]), position)
        if first != position:
            raise VocabularyError(
                f"Duplicate word in vocabulary: {items[position]!r} is at positions {first} and "
                f"{position}; give every item once, or make them Tokens with different ids"
            )


@frozen(eq=False)
class Nodes:
    """The nodes of a trie, breadth first. Siblings are neighbours, in the order of their symbols.

    Node 0 is the root. An item's *rank* is its place in sorted order. So the items below a node
    are a range of ranks.

    Attributes:
        begin: ``[size]`` The first rank of the items below a node. Items that equal its prefix
            come first.
        end: ``[size]`` The rank after the last of the items below a node.
        parent: ``[size]`` The node above; -1 for the root.
        symbol: ``[size]`` Code of the symbol on the edge into a node; -1 for the root.
        first_child: ``[size + 1]`` The children of node ``i`` are ``first_child[i]..first_child[i +
            1] - 1``.
        node_of_item: ``[items]`` The node at which the item of each rank ends.
    """

    begin: Ints
    end: Ints
    parent: Ints
    symbol: Ints
    first_child: Ints
    node_of_item: Ints

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.begin)

    def children(self, node: int) -> slice:
        """The children of a node, which are consecutive nodes."""
        return slice(*self.first_child[node : node + 2].tolist())

    def child(self, node: int, code: int) -> int | None:
        """The child of a node with a given symbol code; the code of a byte is its value."""
        children = self.children(node)
        siblings = self.symbol[children]
        index = int(np.searchsorted(siblings, code))
        return children.start + index if code in siblings[index : index + 1] else None

    def ending(self, node: int) -> int:
        """How many items equal the prefix of a node. They come first below it."""
        starts = self.begin[self.children(node)]
        stop = starts[0] if len(starts) else self.end[node]
        return int(stop - self.begin[node])

    @classmethod
    def of(cls, items: SortedItems) -> Nodes:
        """Make a node for every distinct prefix, in one vectorised pass over the items.

        Every item visits each of its prefixes, from the empty one to the whole. Sorted by depth,
        the visits to one node are neighbours. The first of them belongs to an item that shares
        less than this prefix with the item before it.
        """
        visits = items.lengths + 1
        rank, depth = np.repeat(np.arange(len(visits)), visits), count_up(visits)
        # A narrow type is quicker to sort.
        narrow = depth.astype(np.min_scalar_type(int(visits.max())))
        by_depth = np.argsort(narrow, kind="stable")
        rank, depth = rank[by_depth], depth[by_depth]
        is_first = shared_prefixes(items)[rank] < depth
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(rank)) - 1

        node_of_visit = np.empty_like(by_depth)
        node_of_visit[by_depth] = np.cumsum(is_first) - 1
        # The previous visit of an item is to the parent node.
        parent = node_of_visit[by_depth[first] - 1]
        parent[0] = -1
        begin = rank[first]
        last_symbol = _starts(items.lengths)[begin] + depth[first] - 1
        symbol = np.append(items.symbols, 0)[last_symbol].astype(np.int64)
        symbol[0] = -1
        return cls(
            begin=begin,
            end=rank[last] + 1,
            parent=parent,
            symbol=symbol,
            first_child=np.searchsorted(parent, np.arange(len(first) + 1)),
            node_of_item=node_of_visit[np.cumsum(visits) - 1],
        )


def shared_prefixes(items: SortedItems) -> Ints:
    """``[items]`` How many symbols each item shares with the item before it; -1 for the first."""
    # One place beyond the shorter item, where the two always differ.
    compared = np.minimum(items.lengths[1:], items.lengths[:-1]) + 1
    starts, symbol = _starts(compared), count_up(compared)
    begins, symbols = _starts(items.lengths), np.append(items.symbols, 0)
    before, after = (
        symbols[np.repeat(begin, compared) + symbol] for begin in (begins[:-1], begins[1:])
    )
    differs = before != after
    differs[starts + compared - 1] = True
    difference = np.flatnonzero(differs)
    return np.append(-1, difference[np.searchsorted(difference, starts)] - starts)


def _starts(lengths: Ints) -> Ints:
    """The beginning of each of several consecutive runs."""
    return np.cumsum(lengths) - lengths


def count_up(lengths: Ints) -> Ints:
    """0, 1, 2, ... for every run."""
    return np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
