"""The probability of the next bytes: compared with brute force over random vocabularies, rows and
texts; and which rows are not requested."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from genlm.core import (
    InvalidInputError,
    InvalidOptionError,
    MockAsyncLM,
    Token,
    UnknownAdapterError,
)
from genlm.core.next_bytes import BytePrefix, next_bytes_logprob
from genlm.core.trie import TokenCharacterTrie

from .conftest import PATIENCE

#: Few symbols, so that texts have many tokenisations. Some are not UTF-8.
SYMBOLS = (b"a", b"b", b"\xc3", b"\x9f", b"\xff")


def text(least: int, most: int) -> st.SearchStrategy[bytes]:
    return st.lists(st.sampled_from(SYMBOLS), min_size=least, max_size=most).map(b"".join)


class Random:
    """A model over any vocabulary: its rows depend on the whole context, and some tokens of each
    have no probability at all.

    Args:
        vocab: The bytes of every token; some may be empty, or equal.
        special: Which of them are special.
        seed: Fixes the rows.
        spread: The standard deviation of the logits.
    """

    def __init__(self, vocab: list[bytes], special: set[int], seed: int, spread: float) -> None:
        self.vocab, self.special, self.seed, self.spread = vocab, special, seed, spread
        self.eos_token_id = len(vocab)
        self.all_special_ids = [*sorted(special), self.eos_token_id]

    def __len__(self) -> int:
        return len(self.vocab) + 1

    def token_bytes(self) -> list[bytes]:
        return [*self.vocab, b"<end>"]

    def row(self, token_ids: list[int]) -> torch.Tensor:
        random = np.random.default_rng([self.seed, *token_ids])
        logits = torch.from_numpy(random.normal(0, self.spread, len(self)))
        logits[torch.from_numpy(random.random(len(self)) < 0.2)] = -torch.inf
        logits[self.eos_token_id] = 0.0
        return logits.log_softmax(0).float()

    def tokenisations(self, target: bytes) -> Iterator[tuple[int, ...]]:
        """Every sequence of tokens whose last token completes the target."""
        unfinished: list[tuple[int, ...]] = [()]
        while unfinished:
            ids = unfinished.pop()
            for token_id, content in enumerate(self.vocab):
                written = b"".join([self.vocab[i] for i in ids]) + content
                if token_id in self.special or not content:
                    continue
                if written.startswith(target):
                    yield (*ids, token_id)
                elif target.startswith(written):
                    unfinished.append((*ids, token_id))

    def probability(self, context: list[int], ids: tuple[int, ...]) -> float:
        rows = (self.row([*context, *ids[:at]]).double() for at in range(len(ids)))
        return math.exp(sum(float(row[i]) for row, i in zip(rows, ids, strict=True)))


class Asked(MockAsyncLM):
    """A mock with random rows, or with those of the function ``row``."""

    def __init__(
        self, random: Random | None, row: Callable[[list[int]], torch.Tensor] | None = None
    ) -> None:
        super().__init__(random)
        self.row = row or random.row  # type: ignore[union-attr]

    def _get_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        return self.row(list(token_ids))


@given(
    vocab=st.lists(text(0, 4), min_size=1, max_size=12),
    special=st.sets(st.integers(1, 11), max_size=3),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.0, 1.0, 20.0]),
    context=st.lists(st.integers(0, 12), min_size=1, max_size=3),
    target=text(1, 6),
)
@settings(max_examples=80)
def test_next_bytes_probability_is_the_sum_over_all_tokenisations(
    vocab, special, seed, spread, context, target
):
    random = Random(vocab, {i for i in special if i < len(vocab)}, seed, spread)
    context = [i % len(random) for i in context]
    ways = list(random.tokenisations(target))
    expected = sum(random.probability(context, ids) for ids in ways)
    with Asked(random) as lm:
        trie = TokenCharacterTrie(lm.byte_vocab)
        found = asyncio.run(next_bytes_logprob(lm, context, target, trie=trie))
        assert math.exp(found) == pytest.approx(expected, rel=1e-9, abs=1e-300)
        shorter = asyncio.run(next_bytes_logprob(lm, context, target[:-1], trie=trie))
        assert found <= shorter + 1e-9


def test_the_text_needs_room():
    with MockAsyncLM(max_context=3) as lm:
        with pytest.raises(InvalidInputError, match=r"of 4 tokens exceeds .*; the bytes after"):
            asyncio.run(next_bytes_logprob(lm, [1, 2, 3], b"ab"))
        with pytest.raises(InvalidInputError, match=r"of 4 tokens exceeds .*shorten it$"):
            asyncio.run(next_bytes_logprob(lm, [1, 2, 3, 4], b"ab"))


@given(vocab=st.lists(text(1, 3), min_size=1, max_size=6, unique=True), target=text(1, 6))
@settings(max_examples=50)
def test_the_limit_is_the_number_of_contexts(vocab, target):
    """All the beginnings of tokenisations, also of those that cannot be completed."""
    random = Random(vocab, set(), 0, 0.0)
    beginnings: set[tuple[int, ...]] = {()}
    grown = {()}
    while grown:
        grown = {
            (*ids, i)
            for ids in grown
            for i, content in enumerate(vocab)
            if target.startswith(written := b"".join(vocab[j] for j in ids) + content)
            and written != target
        }
        beginnings |= grown
    with Asked(random) as lm:
        asyncio.run(next_bytes_logprob(lm, [0], target, max_contexts=len(beginnings)))
        with pytest.raises(InvalidInputError, match=f"at least {len(beginnings)} contexts"):
            asyncio.run(next_bytes_logprob(lm, [0], target, max_contexts=len(beginnings) - 1))


def test_underflow_is_harmless_even_if_numpy_raises():
    def sure(token_ids):
        return torch.where(torch.arange(258) == 97, 0.0, -740.0 if len(token_ids) == 1 else -1e3)

    async def ask(lm):
        b = await (await BytePrefix.after(lm, [0], min_share=0.0)).extend(b"b")
        return b.logprob, (await b.next_byte_logprobs())[97]

    with Asked(None, sure) as lm, np.errstate(all="raise"):
        assert asyncio.run(ask(lm)) == (pytest.approx(-740.0, abs=0.01), 0.0)
        assert asyncio.run(next_bytes_logprob(lm, [0], b"ab")) == -math.inf


#: There are several ways to write each text. Token 7 is special.
VOCAB = [b"a", b"ab", b"b", b"ba", b"abb", b"bab", b"", b"<a>", b"ab"]


@pytest.fixture
def lm():
    with Asked(Random(VOCAB, {7}, 0, 1.0)) as lm:
        yield lm


def test_a_token_that_the_model_never_draws_is_not_followed():
    def row_of(token_ids):
        assert 0 not in token_ids[1:], "asked after a token of probability 0"
        row = torch.zeros(10)
        row[0] = -torch.inf
        return row.log_softmax(0)

    with Asked(Random(VOCAB, {7}, 0, 1.0), row_of) as lm:
        logprob = asyncio.run(next_bytes_logprob(lm, [1], b"ab"))
        assert math.exp(logprob) == pytest.approx(3 / 9, rel=1e-6)


def test_contexts_are_requested_together(lm):
    asyncio.run(next_bytes_logprob(lm, [0], b"abbab"))
    assert lm.stats.largest_batch > 1
    assert lm.stats.batches <= 5  # at most one for each token in a row


def test_a_long_text_is_rejected_without_a_look_at_the_whole(lm):
    class Counting(TokenCharacterTrie):
        found = 0

        def find(self, prefix):
            self.found += 1
            return super().find(prefix)

    trie = Counting(lm.byte_vocab)
    with pytest.raises(InvalidInputError, match="contexts, but at most 10000 are asked"):
        asyncio.run(next_bytes_logprob(lm, [0], b"ab" * 10_000, trie=trie))
    assert trie.found < 100
    assert lm.stats.rows == 0


def test_a_long_text_can_be_cancelled():
    class Stopped(MockAsyncLM):
        async def next_token_logprobs(self, token_ids, *arguments, **options):
            if len(token_ids) > 500:  # deeper than tasks that await each other can be cancelled
                asking.set()
                await asyncio.Event().wait()
            return await super().next_token_logprobs(token_ids, *arguments, **options)

    async def cancel():
        task = asyncio.ensure_future(next_bytes_logprob(lm, [0], b"a" * 600))
        await asyncio.wait_for(asking.wait(), PATIENCE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asking = asyncio.Event()
    with Stopped() as lm:
        asyncio.run(cancel())


# --- byte by byte ---------------------------------------------------------------------------------


@given(
    vocab=st.lists(text(0, 4), min_size=1, max_size=12),
    special=st.sets(st.integers(1, 11), max_size=3),
    seed=st.integers(0, 2**32),
    target=text(0, 5),
)
@settings(max_examples=25)
def test_next_byte_probabilities_match_those_of_longer_texts(vocab, special, seed, target):
    random = Random(vocab, {i for i in special if i < len(vocab)}, seed, 1.0)

    async def compare():
        trie = TokenCharacterTrie(lm.byte_vocab)
        prefix = await BytePrefix.after(lm, [0], trie=trie, min_share=0.0)
        prefix = await (await prefix.extend(target[:2])).extend(target[2:])
        assert prefix.text == target
        whole = await next_bytes_logprob(lm, [0], target, trie=trie)
        assert prefix.logprob == pytest.approx(whole, abs=1e-9)
        if whole == -math.inf:
            with pytest.raises(InvalidInputError, match="has probability 0 after this context"):
                await prefix.next_byte_logprobs()
            return
        logprobs = await prefix.next_byte_logprobs()
        assert np.exp(logprobs).sum() == pytest.approx(1.0)
        for byte in {*b"".join(SYMBOLS), ord("z")}:
            longer = await next_bytes_logprob(lm, [0], target + bytes([byte]), trie=trie)
            assert whole + logprobs[byte] == pytest.approx(longer, abs=1e-6)

    with Asked(random) as lm:
        asyncio.run(compare())


#: Every text of these bytes has many tokenisations: 2 ** (n - 1) for n bytes.
ALL = [b"a" * n for n in range(1, 40)]


def test_a_byte_costs_about_one_row_however_many_came_before():
    """The likeliest tokenisation has 20 times the probability of the next."""
    row = torch.full((40,), -12.0)
    row[2] = 0.0  # the token with three bytes

    async def complete():
        prefix = await BytePrefix.after(lm, [0], trie=TokenCharacterTrie(lm.byte_vocab))
        for _ in range(30):
            await prefix.next_byte_logprobs()
            prefix = await prefix.extend(b"a")
        return prefix

    with Asked(Random(ALL, set(), 0, 0.0), lambda token_ids: row.log_softmax(0)) as lm:
        prefix = asyncio.run(complete())
        assert lm.stats.rows <= 60
        assert lm.stats.batches <= 30
        assert -0.01 < prefix.logprob < 0.0


def test_changing_the_ids_or_the_adapter_meanwhile_has_no_effect():
    async def followed(lm: MockAsyncLM, *, changes: bool) -> float:
        ids = [72]
        asked = asyncio.ensure_future(next_bytes_logprob(lm, ids, b"abc"))
        while changes and not (lm.stats.requests or asked.done()):
            await asyncio.sleep(0)
            ids.clear()
        if changes:
            lm.set_lora("poems")
        return await asked

    with MockAsyncLM() as lm:
        lm.add_new_lora("poems", "poems")
        found = asyncio.run(followed(lm, changes=True))
        lm.clear_lora()
        assert found == asyncio.run(followed(lm, changes=False))


def test_prefix_is_invalid_after_its_adapter_is_rebound():
    """Rows of two adapters make no distribution."""

    async def follow(lm: MockAsyncLM) -> None:
        lm.add_new_lora("first", "one")
        prefix = await (await BytePrefix.after(lm, [72], "one")).extend(b"a")
        lm.add_new_lora("second", "one")
        with pytest.raises(UnknownAdapterError, match="bound again"):
            await prefix.extend(b"bc")
        again = await BytePrefix.after(lm, [72], "one")
        await again.extend(b"abc")

    with MockAsyncLM() as lm:
        asyncio.run(follow(lm))


def test_unlikely_tokenisations_are_followed_once_likely_ones_end():
    vocab = [b"a", b"aa", b"aaa", b"b", b"bb"]

    def row_of(token_ids):
        unlikely = {(0,): {1: 0.0, 0: -20.0}, (0, 0): {0: 0.0}, (0, 1): {2: 0.0}}
        row = torch.full((6,), -torch.inf)
        for token_id, logit in unlikely.get(tuple(token_ids), {3: 0.0, 4: -20.0}).items():
            row[token_id] = logit
        return row.log_softmax(0)

    async def follow():
        prefix = await BytePrefix.after(lm, [0])
        assert (await prefix.extend(b"aa")).logprob == pytest.approx(0.0, abs=1e-6)
        surprised = await prefix.extend(b"aab")
        before = lm.stats.rows
        assert (await surprised.extend(b"b" * 15)).logprob == pytest.approx(-20.0, abs=1e-5)
        assert lm.stats.rows - before < 30  # there are 987 ways to write these bytes
        return surprised.logprob

    with Asked(Random(vocab, set(), 0, 0.0), row_of) as lm:
        assert asyncio.run(follow()) == pytest.approx(-20.0, abs=1e-5)


def tabled(*table: list[float]) -> Asked:
    """The probabilities of the tokens ``a``, ``abc``, ``bc`` by the context's length."""
    return Asked(
        Random([b"a", b"abc", b"bc"], set(), 0, 0.0),
        lambda token_ids: torch.tensor([*table[len(token_ids) - 1], 0.0]).log(),
    )


def test_equally_likely_tokenisation_is_never_left_out():
    async def follow():
        prefix = await BytePrefix.after(lm, [0], min_share=0.9)
        return await (await prefix.extend(b"ab")).next_byte_logprobs()

    with tabled([0.5, 0.5, 0.0], [0.0, 0.0, 1.0]) as lm:  # the text can be one token or two
        assert asyncio.run(follow())[ord("c")] == 0.0


def test_a_row_without_mass_has_no_next_byte():
    async def follow():
        prefix = await (await BytePrefix.after(lm, [0])).extend(b"a")
        assert (await prefix.extend(b"a")).logprob == -math.inf
        await prefix.next_byte_logprobs()

    nothing = [0.0, 0.0, 0.0]
    with tabled([1.0, 0.0, 0.0], nothing) as lm, pytest.raises(InvalidInputError, match="no byte"):
        asyncio.run(follow())
    # The likeliest of two tokenisations cannot be continued. (The other one may have been left
    # out.)
    for first in ([0.9, 0.1, 0.0], [0.9999, 0.0001, 0.0]):
        with tabled(first, nothing) as lm:
            prefix = asyncio.run(BytePrefix.after(lm, [0]))
            prefix = asyncio.run(prefix.extend(b"a"))
            assert asyncio.run(prefix.next_byte_logprobs())[ord("b")] == 0.0


def test_invalid_arguments_are_rejected_by_name(lm):
    prefix = asyncio.run(BytePrefix.after(lm, [0]))
    for ask, said in (
        (BytePrefix.after(lm, [0], min_share=2.0), "min_share must be a .* from 0 to 1; got 2"),
        (prefix.extend("a"), "more must be bytes"),
        (next_bytes_logprob(lm, [0], "ab"), "next_bytes must be bytes; got 'ab'"),
        (next_bytes_logprob(lm, [0], b"a", max_contexts=None), "max_contexts must be .* got None"),
        (next_bytes_logprob([72], lm, b"a"), r"give a model, .* got \[72\]"),
        (BytePrefix.after(lm, [0], trie="x"), "give a model, .* trie='x'"),
    ):
        with pytest.raises((InvalidInputError, InvalidOptionError), match=said):
            asyncio.run(ask)


def test_a_trie_of_other_tokens_is_rejected(lm):
    tokens = lm.byte_vocab
    without = asyncio.run(next_bytes_logprob(lm, [0], b"ab"))
    equal = [Token(t.token_id, bytes(t), t.is_special) for t in tokens]
    for items in (tokens, equal):
        trie = TokenCharacterTrie(items)
        assert asyncio.run(next_bytes_logprob(lm, [0], b"ab", trie=trie)) == without
    distinct = [b"%d" % i for i in range(len(tokens))]
    for items in (tokens[::-1], distinct, [b"a"]):
        said = f"the trie of {len(items)} items is not one of this model's 10 tokens"
        with pytest.raises(InvalidInputError, match=said):
            asyncio.run(next_bytes_logprob(lm, [0], b"ab", trie=TokenCharacterTrie(items)))


def test_former_import_paths_work():
    from genlm.core import trie

    assert trie.BytePrefix is BytePrefix
    assert trie.next_bytes_logprob is next_bytes_logprob
    with pytest.raises(AttributeError, match=r"'genlm.core.trie' has no attribute 'Trie'"):
        _ = trie.Trie
