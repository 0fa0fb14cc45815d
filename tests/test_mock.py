"""The mock: a pure function of tokens and adapter, and a base for distributions of one's own."""

from __future__ import annotations

import asyncio
import itertools
import math
import time

import numpy as np
import pytest
import torch
from attrs import evolve

from genlm.core import (
    Adapter,
    EngineError,
    InvalidOptionError,
    MockAsyncLM,
    Query,
    SamplingParams,
    load_model_by_name,
)
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine, hashed_row
from tools.tiny import write_tokenizer


def test_no_files_and_no_engine_are_needed():
    with load_model_by_name("mock", backend="mock") as lm:
        ids = lm.tokenizer.encode("héllo")
        assert b"".join(lm.byte_vocab[i].byte_string for i in ids).decode() == "héllo"
        assert lm.tokenizer.decode([*ids, lm.tokenizer.eos_token_id]) == "héllo<|eos|>"
        assert lm.special_token_ids == [256, 257]
        assert asyncio.run(lm.next_token_logprobs(ids)).shape == (len(lm.byte_vocab),) == (258,)


def test_rows_are_pure_and_do_not_collide():
    contexts = [ids for n in (1, 2, 3) for ids in itertools.product(range(4), repeat=n)]
    a, b = Adapter("a", "path/a", 1), Adapter("b", "path/b", 2)
    keys = list(itertools.product(contexts, [None, a, b]))
    rows = [hashed_row(*key, 16) for key in keys]
    assert len({row.numpy().tobytes() for row in rows}) == len(rows)
    again = [
        hashed_row(ids, adapter and evolve(adapter, name="c", version=9), 16)
        for ids, adapter in keys
    ]
    assert all(map(torch.equal, rows, again))


def test_mock_subclass_gives_its_own_rows():
    class Counting(MockAsyncLM):
        """As users of the library write it: with the random state of the base class."""

        def __init__(self, tokenizer, bonus):
            super().__init__(tokenizer)
            self.bonus = bonus

        def _get_logprobs(self, token_ids):
            self._rng.seed(len(token_ids))
            logits = self._rng.rand(len(self.tokenizer))
            logits[sum(token_ids)] += self.bonus
            return torch.log_softmax(torch.from_numpy(logits.astype(np.float32)), dim=-1)

    with Counting(ByteTokenizer(), bonus=50.0) as lm:
        assert int(lm.next_token_logprobs_sync([3, 4]).argmax()) == 7
        assert int(asyncio.run(lm.next_token_logprobs([3, 5])).argmax()) == 8
        assert asyncio.run(lm.sample([1], 3, [], temperature=0)) == [1, 2, 4]


class OfWidth(MockAsyncLM):
    """A mock whose rows have a given width, and in which all tokens are equally likely."""

    def __init__(self, width, **options):
        super().__init__(**options)
        self.width = width

    def _get_logprobs(self, token_ids):
        return np.full(self.width, -np.log(max(1, math.prod(np.atleast_1d(self.width)))))


@pytest.mark.parametrize("width", [300, 0, (1, 258), (258, 1)])
@pytest.mark.parametrize("continuous", [False, True])
def test_own_row_of_invalid_width_is_rejected(width, continuous):
    with OfWidth(width, continuous=continuous) as lm:
        for ask in (
            lambda: lm.next_token_logprobs_sync([1]),
            lambda: lm.sequence_logprobs_sync([1], [3, 257]),
            lambda: lm.sample_sync([1], 20, [], seed=1),
        ):
            with pytest.raises(EngineError, match=r"of shape \(.*\).* has 258 tokens: give"):
                ask()


@pytest.mark.parametrize("continuous", [False, True])
def test_narrower_own_row_lacks_the_last_tokens(continuous):
    """The tests of genlm-control use such a mock, whose rows leave out the special tokens."""
    with OfWidth(10, continuous=continuous) as lm:
        row = lm.next_token_logprobs_sync([1])
        assert row.shape == (258,)
        assert row[:10].tolist() == pytest.approx([-math.log(10)] * 10)
        assert row[10:].isneginf().all()
        scores = lm.sequence_logprobs_sync([1], [3, 257]).tolist()
        assert scores == [pytest.approx(-math.log(10)), -math.inf]
        assert max(lm.sample_sync([1], 20, [], seed=1)) < 10


def test_tokenizer_with_only_the_protocols_methods_works():
    class Bytes:
        def encode(self, text):
            return list(text.encode())

        def decode(self, token_ids):
            return bytes(token_ids).decode()

        def token_bytes(self):
            return [bytes([byte]) for byte in range(256)]

    with MockAsyncLM(Bytes()) as lm:
        assert lm.next_token_logprobs_sync(lm.encode("hi")).shape == (256,)


@pytest.mark.parametrize("given", ["gpt2", ByteTokenizer])
def test_mock_rejects_an_object_that_is_no_tokenizer(given):
    with pytest.raises(InvalidOptionError, match=r"MockAsyncLM\.from_name\(name\) .*; got"):
        MockAsyncLM(given)


def test_mock_advances_in_the_steps_of_a_continuous_engine():
    with pytest.raises(InvalidOptionError, match="no option steps of its own; continuous=True"):
        MockAsyncLM(steps=3)
    with MockAsyncLM(steps=3, continuous=True) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (258,)


def test_long_sample_follows_the_rows_and_lets_others_between():
    with MockAsyncLM() as lm:
        drawn = lm.sample_sync([1, 2], 300, [], seed=5)
        assert lm.stats.draws == 0
        assert drawn[:200] == lm.sample_sync([1, 2], 200, [], seed=5)
        assert lm.stats.draws == 1


def test_changing_distribution_is_never_cached():
    class Changing(MockAsyncLM):
        best = 3

        def _get_logprobs(self, token_ids):
            row = torch.full((258,), -9.0)
            row[self.best] = 0.0
            return row.log_softmax(-1)

    with Changing() as lm:
        assert int(lm.next_token_logprobs_sync([1]).argmax()) == 3
        lm.best = 9
        assert int(lm.next_token_logprobs_sync([1]).argmax()) == 9
    for kept in ({"cache_size": 10}, {"cache_opts": {"maxsize": 10}}):
        with Changing(**kept) as lm:
            lm.next_token_logprobs_sync([1])
            lm.best = 9
            assert int(lm.next_token_logprobs_sync([1]).argmax()) == 3


def test_every_evaluation_takes_the_delay(monkeypatch):
    waited = []
    monkeypatch.setattr("genlm.core.mock.time.sleep", waited.append)
    engine = MockEngine(ByteTokenizer(), delay=3.0)
    engine.genlm_next_token_logprobs([Query((1,))])
    engine.genlm_sample([Query((1,))], [SamplingParams(max_tokens=1)])
    engine.genlm_sequence_logprobs([Query((1,))], [(2,)])
    assert waited == [3.0] * 3


def test_a_step_that_is_woken_is_continued_by_the_next(monkeypatch):
    engine = ContinuousMockEngine(ByteTokenizer(), steps=1, delay=3600.0)
    engine.genlm_wake()
    assert engine.advance([Query((1,))]) == []
    later = time.monotonic() + 3600
    monkeypatch.setattr("genlm.core.mock.time.monotonic", lambda: later)
    (answer,) = engine.advance([])
    assert answer.request == Query((1,))


def test_mock_takes_a_hugging_face_tokenizer(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    write_tokenizer(tmp_path, "<s>", "the", "Ġcat")
    with (
        MockAsyncLM.from_name(str(tmp_path)) as lm,
        load_model_by_name(str(tmp_path), backend="mock") as other,
    ):
        ids = lm.tokenizer.encode("the cat")
        assert b"".join(lm.byte_vocab[i].byte_string for i in ids) == b"the cat"
        assert torch.equal(lm.next_token_logprobs_sync(ids), other.next_token_logprobs_sync(ids))


def test_a_tokenizer_may_have_gaps_among_its_ids() -> None:
    class Gaps(ByteTokenizer):
        def get_vocab(self) -> dict[str, int]:
            return {"a": 97, "b": 300}

        def token_bytes(self) -> list[bytes]:
            return [b""] * 300 + [b"b"]

    with MockAsyncLM(Gaps()) as lm:
        assert lm.next_token_logprobs_sync([97, 300]).isfinite().sum() == len(lm.byte_vocab) == 301
