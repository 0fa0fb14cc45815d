"""Drawings of the trie."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from genlm.core import InvalidInputError, InvalidOptionError
from genlm.core.tokenization import Token
from genlm.core.trie import TokenCharacterTrie

WORDS = [b"the", b"then", b"\n", "é".encode(), b"\xff"]
WEIGHTS = [0.5, 0.25, 0.1, 0.1, 0.05]


@pytest.fixture(scope="module")
def trie():
    return TokenCharacterTrie(Token.vocabulary(WORDS))


def lines(drawing):
    return [tuple(line.split(maxsplit=1)) for line in drawing.splitlines()]


def test_drawing_shows_every_node_below_its_parent(trie):
    drawing = trie.draw(trie.weight_sum(WEIGHTS))
    assert len(drawing.splitlines()) == len(trie)
    assert lines(drawing)[:6] == [
        ("1", "''"),
        ("0.75", "'t'"),
        ("0.75", "'th'"),
        ("0.75", "'the'"),
        ("0.5", "item 0"),
        ("0.25", "'then'"),
    ]
    assert {text for _, text in lines(drawing)} >= {r"'\n'", "'é'", r"'\\xff'"}


def test_drawing_of_a_large_trie_shows_the_heaviest_nodes(trie):
    assert lines(trie.draw(trie.weight_sum(WEIGHTS), max_nodes=3)) == [
        ("1", "''  (3 more below)"),
        ("0.75", "'t'"),
        ("0.75", "'th'  (1 more below)"),
    ]


def test_drawing_costs_only_the_drawn_nodes():
    """For a vocabulary, dictionaries of all nodes took more than a second."""
    words = [number.to_bytes(2, "big") for number in range(1 << 16)]
    trie = TokenCharacterTrie(words)
    weights = trie.weight_sum(np.arange(len(words)) / len(words))
    tracemalloc.start()
    drawing = trie.draw(weights, max_nodes=3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert drawing.splitlines()[0].endswith("''  (254 more below)")
    assert peak < 8 * len(words)  # not even a pointer for each item


def test_without_weights_items_are_counted_and_log_weights_can_be_drawn(trie):
    assert lines(trie.draw())[0] == ("5", "''")
    with np.errstate(divide="ignore"):
        logs = np.log([*WEIGHTS[:-1], 0.0])
    assert lines(trie.draw(trie.weight_max(logs)))[-1] == ("-inf", "item 4")


def test_symbol_that_is_not_a_byte_is_drawn_unchanged():
    assert "'256'" in TokenCharacterTrie([(256,)]).draw()


def test_drawing_with_invalid_arguments_is_rejected(trie):
    with pytest.raises(InvalidInputError, match="weights by node"):
        trie.draw(WEIGHTS)
    for most in (0, None, "5"):
        with pytest.raises(InvalidOptionError, match=f"of at least 1; got {most!r}"):
            trie.draw(max_nodes=most)
