"""The mass of a prefix of bytes, and the exact probability of the next bytes."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from genlm.core import InvalidInputError, MockAsyncLM, Token
from genlm.core.trie import TokenCharacterTrie, next_bytes_logprob

VOCAB = [b"a", b"ab", b"b", b"ba", b"abb", b"bab", b"", b"<a>", b"ab", b"\xff"]
SPECIAL = [7]


class Small:
    """A tokenizer with several ways to write each text, and with tokens that are not text."""

    eos_token_id = 7

    def __len__(self):
        return len(VOCAB)

    def encode(self, text):
        raise NotImplementedError

    def decode(self, token_ids):
        raise NotImplementedError

    def token_bytes(self):
        return VOCAB


@pytest.fixture
def lm():
    with MockAsyncLM(Small()) as lm:
        yield lm


# --- of the next token ----------------------------------------------------------------------------


def test_the_mass_of_a_prefix(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    row = lm.next_token_logprobs_sync([0])
    p = row.double().exp()
    assert trie.mass(row, b"ab") == pytest.approx(float(p[1] + p[4] + p[8]), rel=1e-12)
    assert trie.mass(row.numpy(), b"a") == pytest.approx(float(p[[0, 1, 4, 8]].sum()), rel=1e-12)
    assert trie.mass(row, b"") == pytest.approx(1 - float(p[7]), rel=1e-6)


def test_a_prefix_of_nothing_has_no_mass(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    row = lm.next_token_logprobs_sync([0])
    assert trie.mass(row, b" zzz") == 0.0
    assert trie.mass(row, b"abbb") == 0.0


def test_special_tokens_are_not_text(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    row = lm.next_token_logprobs_sync([0])
    assert trie.mass(row, b"<") == 0.0
    assert trie.mass(row, b"<", special=True) == pytest.approx(math.exp(row[7]), rel=1e-6)
    assert [token.token_id for token in lm.byte_vocab if token.is_special] == SPECIAL
    assert lm.special_token_ids == SPECIAL


def test_a_str_is_refused_where_symbols_are_bytes(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    row = lm.next_token_logprobs_sync([0])
    with pytest.raises(
        InvalidInputError, match=r"symbols of this trie are bytes; got the str 'ab'"
    ):
        trie.mass(row, "ab")
    with pytest.raises(InvalidInputError, match="encode it first"):
        trie.find("ab")
    strings = TokenCharacterTrie(["ab", "b"])
    assert strings.mass(np.log([0.25, 0.75]), "a") == pytest.approx(0.25)


@pytest.mark.parametrize("row", [np.full(10, 0.1), np.full(10, np.nan), np.zeros(10)])
def test_weights_that_are_not_log_probabilities_are_refused(lm, row):
    with pytest.raises(InvalidInputError, match="row must be log-probabilities"):
        TokenCharacterTrie(lm.byte_vocab).mass(row, b"a")


def test_a_row_of_another_shape_is_refused(lm):
    with pytest.raises(InvalidInputError, match=r"the trie needs \[10\]"):
        TokenCharacterTrie(lm.byte_vocab).mass(np.zeros(3), b"a")


# --- of the next bytes ----------------------------------------------------------------------------


def brute_force(lm, context, text):
    """Draw every sequence of tokens until its bytes are as many as those of ``text``."""
    if not text:
        return 1.0
    row = lm.next_token_logprobs_sync(context).double().exp()
    total = 0.0
    for token_id, content in enumerate(VOCAB):
        if token_id in SPECIAL or not content:
            continue
        if content.startswith(text):
            total += float(row[token_id])
        elif text.startswith(content):
            rest = brute_force(lm, [*context, token_id], text[len(content) :])
            total += float(row[token_id]) * rest
    return total


@pytest.mark.parametrize("text", [b"a", b"b", b"ab", b"abb", b"abba", b"babab", b"\xff", b"ab\xff"])
def test_the_probability_of_the_next_bytes_is_that_of_all_tokenisations(lm, text):
    logprob = asyncio.run(next_bytes_logprob(lm, [0, 3], text))
    assert math.exp(logprob) == pytest.approx(brute_force(lm, [0, 3], text), rel=1e-9)


def test_the_next_bytes_of_one_length_share_all_the_mass_of_text():
    """Over a vocabulary of single bytes, a special token and nothing else."""

    class Bits(Small):
        eos_token_id = 2

        def __len__(self):
            return 3

        def token_bytes(self):
            return [b"0", b"1", b"<end>"]

    with MockAsyncLM(Bits()) as lm:
        texts = [f"{n:04b}".encode() for n in range(16)]

        async def ask():
            calls = (next_bytes_logprob(lm, [0], text) for text in texts)
            return await asyncio.gather(*calls)

        total = sum(map(math.exp, asyncio.run(ask())))
        ends = 0.0  # the probability that the text ends before
        alive = {(0,): 1.0}
        for _ in range(4):
            rows = {c: lm.next_token_logprobs_sync(list(c)).double().exp() for c in alive}
            ends += sum(alive[c] * float(rows[c][2]) for c in alive)
            alive = {(*c, bit): alive[c] * float(rows[c][bit]) for c in alive for bit in (0, 1)}
    assert total == pytest.approx(1 - ends, rel=1e-6)


def test_what_cannot_be_written(lm):
    assert asyncio.run(next_bytes_logprob(lm, [0], b"abz")) == -math.inf
    assert asyncio.run(next_bytes_logprob(lm, [0], b"<a>")) == -math.inf
    assert asyncio.run(next_bytes_logprob(lm, [0], b"")) == 0.0


def test_a_token_that_the_model_never_draws_is_not_followed():
    class Never(MockAsyncLM):
        def _get_logprobs(self, token_ids):
            assert 0 not in token_ids[1:], "asked after a token of probability 0"
            row = torch.zeros(len(VOCAB))
            row[0] = -torch.inf
            return row.log_softmax(0)

    with Never(Small()) as lm:
        logprob = asyncio.run(next_bytes_logprob(lm, [1], b"ab"))
        assert math.exp(logprob) == pytest.approx(3 / 9, rel=1e-6)


def test_contexts_are_asked_together(lm):
    asyncio.run(next_bytes_logprob(lm, [0], b"abbab"))
    assert lm.stats.largest_batch > 1
    assert lm.stats.batches <= 5  # one for each token in a row at most


def test_a_trie_can_be_given(lm):
    trie = TokenCharacterTrie(lm.byte_vocab)
    given = asyncio.run(next_bytes_logprob(lm, [0], b"ab", trie=trie))
    assert given == asyncio.run(next_bytes_logprob(lm, [0], b"ab"))
    with pytest.raises(
        InvalidInputError, match="the trie has 1 items, but the model has 10 tokens"
    ):
        asyncio.run(next_bytes_logprob(lm, [0], b"ab", trie=TokenCharacterTrie([Token(0, b"a")])))


def test_too_many_tokenisations_are_refused_before_any_is_asked(lm):
    with pytest.raises(InvalidInputError, match=r"contexts, but at most 10000 are asked"):
        asyncio.run(next_bytes_logprob(lm, [0], b"ab" * 40))
    assert lm.stats.rows == 0


def test_a_str_is_refused(lm):
    with pytest.raises(InvalidInputError, match="next_bytes must be bytes; got 'ab'"):
        asyncio.run(next_bytes_logprob(lm, [0], "ab"))
