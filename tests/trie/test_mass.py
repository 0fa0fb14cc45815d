"""The mass of a prefix: the probability that the next token begins with it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from genlm.core import InvalidInputError, Token
from genlm.core.trie import TokenCharacterTrie

VOCAB = [b"a", b"ab", b"b", b"ba", b"abb", b"bab", b"", b"<a>", b"ab", b"\xff"]
ROW = torch.randn(len(VOCAB), generator=torch.Generator().manual_seed(0)).log_softmax(0)
P = ROW.double().exp()


@pytest.fixture(scope="module")
def trie():
    return TokenCharacterTrie(Token.vocabulary(VOCAB, special=[7]))


def test_mass_of_a_prefix_sums_over_its_tokens(trie):
    assert trie.mass(ROW, b"ab") == pytest.approx(float(P[[1, 4, 8]].sum()), rel=1e-12)
    assert trie.mass(ROW.numpy(), b"a") == pytest.approx(float(P[[0, 1, 4, 8]].sum()), rel=1e-12)


def test_mass_too_small_for_a_float_is_none():
    with np.errstate(all="raise"):  # a program may have set this
        assert TokenCharacterTrie([b"a", b"b"]).mass([0.0, -800.0], b"b") == 0.0


def test_special_tokens_are_not_text(trie):
    assert trie.mass(ROW, b"<") == 0.0
    assert trie.mass(ROW, b"<", special=True) == pytest.approx(float(P[7]), rel=1e-12)
    assert trie.mass(ROW, b"") == pytest.approx(1 - float(P[7]), rel=1e-6)


@pytest.mark.parametrize("prefix", [b" zzz", b"abbb"])
def test_unknown_prefix_has_no_node_and_no_mass(trie, prefix):
    assert trie.find(prefix) is None
    assert trie.mass(ROW, prefix) == 0.0


def test_a_str_is_rejected_where_symbols_are_bytes(trie):
    with pytest.raises(
        InvalidInputError, match=r"symbols of this trie are bytes; got the str 'ab'"
    ):
        trie.mass(ROW, "ab")
    with pytest.raises(InvalidInputError, match=r"encode a text with \.encode\(\)"):
        trie.find("ab")
    strings = TokenCharacterTrie(["ab", "b"])
    assert strings.mass(np.log([0.25, 0.75]), "a") == pytest.approx(0.25)


@pytest.mark.parametrize("given", [[7042], [b"a"], ["a"], [None], 97, None, [-1]])
def test_token_ids_and_lists_of_bytes_are_rejected_where_symbols_are_bytes(trie, given):
    with pytest.raises(InvalidInputError, match="or take a token's byte_string"):
        trie.mass(ROW, given)


@pytest.mark.parametrize("given", [bytearray(b"a"), [97], np.array([97], np.uint8), iter(b"a")])
def test_objects_with_bytes_are_prefixes(trie, given):
    assert trie.find(given) == trie.find(b"a")


@pytest.mark.parametrize("row", [np.log(np.full(10, 0.11)), np.full(10, np.nan), np.zeros(10)])
def test_weights_that_are_not_log_probabilities_are_rejected(trie, row):
    with pytest.raises(InvalidInputError, match="row must be log-probabilities"):
        trie.mass(row, b"a")


@pytest.mark.filterwarnings("ignore:coroutine")
def test_invalid_weights_are_rejected(trie):
    async def row():
        return ROW

    for given, message in (
        (row, "got <function"),
        (row(), "write `await` before what gives it"),
        (b"a", "weights must be numbers, .*; got b'a'"),
        ([[1.0], [1.0, 2.0]], "weights must be numbers"),
        (np.zeros(3), r"the trie needs \[10\]"),
        (np.zeros((2, 10)), r"the trie needs \[10\]"),
    ):
        for ask in (
            lambda: trie.mass(given, b"a"),  # noqa: B023
            lambda: trie.weight_sum(given),  # noqa: B023
            lambda: trie.children_max(0, given),  # noqa: B023
        ):
            with pytest.raises(InvalidInputError, match=message):
                ask()


@pytest.mark.parametrize("node", [None, "1", 1.5, -1, 10_000])
def test_node_out_of_range_is_rejected(trie, node):
    said = f"there is no node {node!r}: nodes are 0 to {len(trie) - 1}"
    with pytest.raises(InvalidInputError, match=said):
        trie.children_sum(node, ROW)
    with pytest.raises(InvalidInputError, match=said):
        trie.positions_under(node)


def test_number_of_children_is_right(trie):
    assert trie.heaviest_children(trie.root, ROW.exp(), 0) == []
    with pytest.raises(InvalidInputError, match="k must be an integer of at least 0; got '2'"):
        trie.heaviest_children(trie.root, ROW.exp(), "2")
