"""What a trie is built over, and its shape: sorted words, nodes, and the words below each node."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from itertools import compress, islice, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from attrs import frozen

from genlm.core.errors import VocabularyError
from genlm.core.tokenization.token import Token

Ints = npt.NDArray[np.int64]


@frozen(eq=False)
class Words:
    """The items of a trie as words over an alphabet, sorted.

    Attributes:
        order: ``[n]``: the position, in the order given, of the word with each rank.
        lengths: ``[n]``: letters of the word with each rank.
        letters: all words by rank, joined: letter codes, uint8 or big-endian uint32.
        alphabet: The letter of each code; codes below 256 are the values of bytes.
    """

    order: Ints
    lengths: Ints
    letters: npt.NDArray[Any]
    alphabet: Sequence[Hashable]

    @classmethod
    def of(cls, items: Sequence[Any]) -> Words:
        """Read and sort the items.

        :raises VocabularyError: there is no item, one occurs twice, or one is no sequence of
            hashable letters.
        """
        if not items:
            raise VocabularyError("a trie needs at least one item; the vocabulary given is empty")
        alphabet, spelled, dtype = _spell(items)
        order = sorted(range(len(spelled)), key=spelled.__getitem__)
        in_order = [spelled[position] for position in order]
        _refuse_duplicates(items, in_order, order)
        positions = np.array(order, np.int64)
        positions.flags.writeable = False  # users get it to read
        lengths = (
            np.fromiter(map(len, spelled), np.int64, len(spelled))[positions] // dtype.itemsize
        )
        return cls(positions, lengths, np.frombuffer(b"".join(in_order), dtype), alphabet)


def key_of(item: Any) -> Any:
    """Under what an item is found in ``word2leaf``: a token under ``(byte_string, token_id)``, all
    else under itself."""
    return (item.byte_string, item.token_id) if isinstance(item, Token) else item


def _spell(items: Sequence[Any]) -> tuple[Sequence[Hashable], list[bytes], np.dtype[Any]]:
    """Each item as bytes that sort like its letters, with the letters' alphabet and their width."""
    if all(isinstance(item, bytes) for item in items):
        return range(256), [bytes(item) for item in items], np.dtype(np.uint8)
    codes: dict[Hashable, int] = {byte: byte for byte in range(256)}
    spelled = [
        # Latin-1 and UTF-32 together widen each byte to a letter of four.
        bytes(item).decode("latin-1").encode("utf-32-be")
        if isinstance(item, bytes)
        else _spell_letters(item, codes)
        for item in items
    ]
    return list(codes), spelled, np.dtype(">u4")


def _spell_letters(item: Iterable[Hashable], codes: dict[Hashable, int]) -> bytes:
    try:
        hash(item)  # it is looked up in `word2leaf`
        return np.array([codes.setdefault(letter, len(codes)) for letter in item], ">u4").tobytes()
    except TypeError as error:
        raise VocabularyError(
            f"{item!r} cannot be a word of a trie: items must be Tokens, bytes, str or hashable "
            "iterables of hashable "
            "letters"
        ) from error


def _refuse_duplicates(
    items: Sequence[Any], in_order: Sequence[bytes], order: Sequence[int]
) -> None:
    """Different tokens may share their bytes, but the same item twice would have two masses."""
    seen: dict[Any, int] = {}
    like_the_one_before = map(operator.eq, islice(in_order, 1, None), in_order)
    for before, position in compress(pairwise(order), like_the_one_before):
        seen.setdefault(key_of(items[before]), before)
        first = seen.setdefault(key_of(items[position]), position)
        if first != position:
            raise VocabularyError(
                f"item {items[position]!r} is at positions {first} and {position}: give every item "
                "once, or make them "
                "Tokens with different ids"
            )


@frozen(eq=False)
class Layout:
    """The nodes of a trie over words, breadth first; siblings lie together, in the order of their
    letters.

    Node 0 is the root. Words are known by *rank*, their place in sorted order: the words below a
    node are neighbours.

    Attributes:
        begin, end: ``[size]`` The words below a node have the ranks ``begin..end-1``; those equal
        to its prefix come first.
        parent: ``[size]`` The node above; -1 for the root.
        letter: ``[size]`` Code of the letter on the edge into a node; -1 for the root.
        first_child: ``[size + 1]`` The children of node ``i`` are ``first_child[i]..first_child[i +
            1] - 1``.
        node_of_word: ``[words]`` The node at which the word of each rank ends.
    """

    begin: Ints
    end: Ints
    parent: Ints
    letter: Ints
    first_child: Ints
    node_of_word: Ints

    @property
    def size(self) -> int:
        """The number of nodes."""
        return len(self.begin)

    @classmethod
    def of(cls, words: Words) -> Layout:
        """A node for every distinct prefix, in one vectorised pass over the words.

        Every word visits each of its prefixes, from the empty one to the whole. Sorted by depth,
        the visits to one node are neighbours, and the first of them is that of a word which shares
        less than this prefix with the word before it.
        """
        visits = words.lengths + 1
        by_word = np.repeat(np.arange(len(visits)), visits), _count_up(visits)
        by_depth = np.argsort(
            by_word[1].astype(np.min_scalar_type(int(visits.max()))), kind="stable"
        )
        rank, depth = by_word[0][by_depth], by_word[1][by_depth]
        is_first = shared_prefixes(words)[rank] < depth
        first = np.flatnonzero(is_first)
        last = np.append(first[1:], len(rank)) - 1

        node_of_visit = np.empty_like(by_depth)
        node_of_visit[by_depth] = np.cumsum(is_first) - 1
        parent = node_of_visit[by_depth[first] - 1]  # a word visits the node above just before
        parent[0] = -1
        begin, depth = rank[first], depth[first]
        letter = np.append(words.letters, 0)[_starts(words.lengths)[begin] + depth - 1].astype(
            np.int64
        )
        letter[0] = -1
        return cls(
            begin=begin,
            end=rank[last] + 1,
            parent=parent,
            letter=letter,
            first_child=np.searchsorted(parent, np.arange(len(first) + 1)),
            node_of_word=node_of_visit[np.cumsum(visits) - 1],
        )


def shared_prefixes(words: Words) -> Ints:
    """``[words]``: how many letters each word shares with the word before it; -1 for the first."""
    # With the end of the shorter, which always differs.
    compared = np.minimum(words.lengths[1:], words.lengths[:-1]) + 1
    starts, ends = _starts(compared), np.cumsum(compared)
    letter, begins = _count_up(compared), _starts(words.lengths)
    letters = np.append(words.letters, 0)
    differs = (
        letters[np.repeat(begins[:-1], compared) + letter]
        != letters[np.repeat(begins[1:], compared) + letter]
    )
    differs[ends - 1] = True
    difference = np.flatnonzero(differs)
    return np.append(-1, difference[np.searchsorted(difference, starts)] - starts)


def _starts(lengths: Ints) -> Ints:
    """Where each of several runs begins that lie one behind the other."""
    return np.cumsum(lengths) - lengths


def _count_up(lengths: Ints) -> Ints:
    """0, 1, 2, ... for every run."""
    return np.arange(lengths.sum()) - np.repeat(_starts(lengths), lengths)
