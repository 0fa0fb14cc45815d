"""The shape of the trie, as arrays: which nodes there are, and the range of words below each."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from genlm.core.trie.words import Ints, Words


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
