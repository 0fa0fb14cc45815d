"""The different sets of words that nodes have below them."""

from __future__ import annotations

import numpy as np
from attrs import frozen

from genlm.core.trie.layout import Layout
from genlm.core.trie.words import Ints


@frozen(eq=False)
class Groups:
    """The sets of two or more words that lie below some node. They are nested; each is the union of
    groups and words.

    Attributes:
        of_node: ``[nodes]`` The group below each node; -1 where there is only one word.
        of_word: ``[words]`` The smallest group with the word of each rank; -1 for a word that is
            alone.
        above: ``[groups]`` The smallest group that holds each group and more; -1 for the one that
            holds all.
    """

    of_node: Ints
    of_word: Ints
    above: Ints

    def __len__(self) -> int:
        return len(self.above)

    @classmethod
    def of(cls, layout: Layout) -> Groups:
        """The groups of a trie's nodes."""
        several = np.flatnonzero(layout.end - layout.begin > 1)
        keys = layout.begin[several] * (int(layout.end.max()) + 1) + layout.end[several]
        _, uppermost, group = np.unique(keys, return_index=True, return_inverse=True)
        of_node = np.full(layout.size, -1)
        of_node[several] = group
        parent = layout.parent[several[uppermost]]
        return cls(
            of_node, _above_words(layout, of_node), np.where(parent < 0, -1, of_node[parent])
        )


def _above_words(layout: Layout, of_node: Ints) -> Ints:
    """The smallest group with each word: that of the lowest node above it that has one."""
    node = layout.node_of_word.copy()
    climbing = np.flatnonzero(of_node[node] < 0)
    while len(climbing):
        node[climbing] = layout.parent[node[climbing]]
        climbing = climbing[(node[climbing] >= 0) & (of_node[node[climbing]] < 0)]
    return np.where(node < 0, -1, of_node[node])
