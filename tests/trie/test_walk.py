"""Asking the trie for one node at a time."""

from __future__ import annotations

import numpy as np
import pytest

from genlm.core.tokenization import Token
from genlm.core.trie import TokenCharacterTrie


@pytest.fixture(scope="module")
def trie(vocabulary):
    return TokenCharacterTrie(vocabulary)


def test_every_node_is_found_by_its_prefix(trie):
    for node, prefix in trie.node2prefix.items():
        if node not in trie.leaf2word:
            assert trie.find(prefix) == node
    assert trie.find(b"") == trie.root


def test_the_items_below_a_node_are_a_slice_of_one_array(trie, vocabulary):
    assert sorted(trie.positions.tolist()) == list(range(len(vocabulary)))
    for node, prefix in list(trie.node2prefix.items())[::11]:
        below = trie.positions_under(node)
        if node in trie.leaf2word:
            assert [trie.leaf2word[node]] == [
                (vocabulary[p].byte_string, vocabulary[p].token_id) for p in below
            ]
        else:
            assert {*below.tolist()} == {
                i for i, token in enumerate(vocabulary) if token.startswith(bytes(prefix))
            }
            assert np.shares_memory(below, trie.positions)
    with pytest.raises(ValueError, match="read-only"):
        trie.positions[0] = 0


def test_children_values_match_the_whole_array(trie, weights):
    sums, maxima = trie.weight_sum(weights[0]), trie.weight_max(weights[0])
    for node, children in enumerate(trie.children):
        found = trie.children_sum(node, weights[0])
        assert found.keys() == children.keys()
        assert [*found.values()] == pytest.approx(
            [sums[children[edge]] for edge in found], rel=1e-14
        )
        assert trie.children_max(node, weights[0]) == {
            edge: maxima[child] for edge, child in children.items()
        }


def test_the_heaviest_children_come_first():
    trie = TokenCharacterTrie(
        [Token(0, b"ab"), Token(1, b"ac"), Token(2, b"b"), Token(3, b"a"), Token(4, b"")]
    )
    ws = [0.1, 0.3, 0.2, 0.25, 0.15]
    assert trie.heaviest_children(trie.root, ws, 2) == [
        (ord("a"), pytest.approx(0.65)),
        (ord("b"), 0.2),
    ]
    assert trie.heaviest_children(trie.find(b"a"), ws, 9) == [
        (ord("c"), 0.3),
        ((None, 3), 0.25),
        (ord("b"), 0.1),
    ]
    assert trie.heaviest_children(trie.word2leaf[b"b", 2], ws, 1) == []
