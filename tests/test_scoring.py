"""Scores of whole batches, and of texts longer than a context."""

from __future__ import annotations

import pytest
import torch

from genlm.core import AsyncLM, InvalidOptionError, InvalidQueryError, MockAsyncLM, hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine
from genlm.core.scoring import rolling_windows

from .doubles import Processor, padded

PROMPTS = [[1, 2], [1, 2], [3], [3], [4]]


class Sharp(MockAsyncLM):
    """Rows in which the most likely token has more than half of the mass in some contexts."""

    def _get_logprobs(self, token_ids):
        noise = torch.Generator().manual_seed(hash(tuple(token_ids)) % 2**31)
        scale = 20.0 if sum(token_ids) % 2 else 1.0
        return (scale * torch.randn(258, generator=noise)).log_softmax(-1)


class Certain(MockAsyncLM):
    """One token has all the mass but for a rest."""

    likely = (7,)

    def _get_logprobs(self, token_ids):
        row = torch.full((258,), -20.0)
        row[list(self.likely)] = 0.0
        return row.log_softmax(-1)


@pytest.fixture(params=["native", "rows", "hook"])
def sharp(request, mock, monkeypatch):
    """The mock with its own scores, with the core's, and under a row hook."""
    if request.param == "rows":
        monkeypatch.delattr(MockEngine, "genlm_sequence_logprobs")
    flip = Processor(lambda _, rows: rows.flip(-1))
    return mock(Sharp, wrappers=[flip] if request.param == "hook" else [])


def scores_of(engine, query, tail, width):
    rows = [engine.row(query.extended(tail[:at]))[:width] for at in range(len(tail))]
    return torch.stack(rows).log_softmax(-1)[range(len(tail)), tail]


class Batches(MockEngine):
    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations, width):
        return [scores_of(self, *queries, *continuations, width)]


class Steps(ContinuousMockEngine):
    """An engine that does not take ``width``, so that its scores are not used."""

    def _score(self, query, tail):
        return scores_of(self, query, tail, self.width)


class StepsOfAWidth(Steps):
    @hookimpl
    def genlm_step(self, queries, samples, scores, dropped, width):
        self.width = width
        return super().genlm_step(queries, samples, scores, dropped)


@pytest.mark.parametrize(
    ("engine", "scores"), [(Batches, True), (StepsOfAWidth, True), (Steps, False)]
)
def test_an_engine_scores_among_the_tokens_of_the_tokenizer(engine, scores):
    with AsyncLM(lambda: padded(engine, 264), backend="padded") as lm:
        given = lm.sequence_logprobs_sync([1], [5, 9, 200])
        assert lm.stats.scores == scores
        rows = lm.batch_next_token_logprobs_sync([[1], [1, 5], [1, 5, 9]])
    torch.testing.assert_close(given, rows[range(3), [5, 9, 200]])


def greedy(lm, prompt, length):
    return lm.sample_sync(prompt, length, [], temperature=0)


def test_score_has_the_sum_and_whether_it_is_greedy(sharp):
    first, third, last = (greedy(sharp, prompt, 40) for prompt in ([1, 2], [3], [4]))
    late = [*last[:-1], (last[-1] + 1) % 256]  # only its last token differs
    continuations = [first, [5, 6], third[:1], [*third[:2], 7], late]
    scores = sharp.batch_sequence_logprobs_sync(PROMPTS, continuations)
    assert [score.is_greedy for score in scores] == [True, False, True, False, False]
    for prompt, continuation, score in zip(PROMPTS, continuations, scores, strict=True):
        rows = [
            sharp.next_token_logprobs_uncached([*prompt, *continuation[:i]])[token_id]
            for i, token_id in enumerate(continuation)
        ]
        assert score.logprob == pytest.approx(float(sum(rows)), abs=1e-3)


def test_a_tie_goes_to_the_lowest_id_as_in_a_draw(mock):
    lm = mock(Certain)
    lm.likely = (7, 9)
    assert greedy(lm, [1], 1) == [7]
    found = lm.batch_sequence_logprobs_sync([[1], [1]], [[7], [9]])
    assert [score.is_greedy for score in found] == [True, False]


def test_score_that_must_be_greedy_computes_no_rows(mock):
    lm = mock(Certain)
    assert lm.batch_sequence_logprobs_sync([[1]], [[7, 7, 7]])[0].is_greedy
    assert (lm.stats.scores, lm.stats.rows) == (1, 0)


def test_equal_contexts_are_computed_once(mock):
    lm = mock()
    lm.batch_sequence_logprobs_sync([[1, 2]] * 4, [[3], [4], [5], [3]])
    assert (lm.stats.scores, lm.stats.rows) == (3, 1)


def test_an_empty_batch_and_batches_that_do_not_fit(mock):
    lm = mock()
    assert lm.batch_sequence_logprobs_sync([], []) == []
    for prompts, continuations, said in (
        ([[1], [2]], [[3]], "2 prompts and 1 continuations; give each"),
        ([[1], [2]], [[3], []], r"the continuation is empty; .* one token id$"),
        ([[1]], [3], "a list of contexts must be given"),
    ):
        with pytest.raises(InvalidQueryError, match=said):
            lm.batch_sequence_logprobs_sync(prompts, continuations)


@pytest.mark.parametrize("context_len", [1, 3, 5])
def test_a_long_text_is_scored_in_windows_each_token_once(sharp, context_len):
    ids = [(7 * i) % 256 for i in range(23)]
    found = sharp.rolling_logprobs_sync(ids, max_length=5, context_len=context_len)
    assert found.shape == (22,)
    for first, length in _contexts(23, 5, context_len).items():
        row = sharp.next_token_logprobs_uncached(ids[first - length : first])
        assert float(found[first - 1]) == pytest.approx(float(row[ids[first]]), abs=1e-4)


@pytest.mark.parametrize(("keep", "context_len"), [(1, 1), (1, 4), (2, 3)])
def test_every_window_of_a_long_text_may_begin_with_its_first_tokens(sharp, keep, context_len):
    ids = [(7 * i) % 256 for i in range(23)]
    found = sharp.rolling_logprobs_sync(ids, 5, context_len, keep=keep)
    assert found.shape == (22,)
    later = 5 - keep - context_len + 1  # how many tokens each window after the first one scores
    for place in range(1, 23):
        window = (place - 6) // later  # -1 is the first window
        end = min(23, 6 + (window + 1) * later)
        context = ids[:keep] + ids[end - 1 - 5 + keep : place] if place > 5 else ids[:place]
        row = sharp.next_token_logprobs_uncached(context)
        assert float(found[place - 1]) == pytest.approx(float(row[ids[place]]), abs=1e-4)


def _contexts(length, max_length, context_len):
    """How many tokens come before each scored one."""
    contexts = {}
    for begin, first, end in rolling_windows(length, max_length, context_len):
        for i in range(first, end):
            assert i not in contexts
            contexts[i] = i - begin
    return contexts


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 23, 24])
@pytest.mark.parametrize("context_len", [1, 2, 5])
def test_windows_keep_the_requested_length_and_context(length, context_len):
    contexts = _contexts(length, 5, context_len)
    assert sorted(contexts) == list(range(1, length))
    for i, context in contexts.items():
        assert min(i, context_len) <= context <= 5
    if length > 5:
        assert contexts[length - 1] == 5


def test_text_that_fits_has_one_window(mock):
    lm = mock()
    ids = list(range(20))
    whole = lm.sequence_logprobs_sync(ids[:1], ids[1:])
    assert torch.equal(lm.rolling_logprobs_sync(ids), whole)
    assert torch.equal(lm.rolling_logprobs_sync(ids, context_len=1000), whole)
    torch.set_default_dtype(torch.float64)
    try:
        alone = lm.rolling_logprobs_sync([1])
    finally:
        torch.set_default_dtype(torch.float32)
    assert alone.shape == (0,)
    assert alone.dtype == torch.float32


def test_the_models_own_limit_is_the_window(mock):
    lm = mock(max_context=4)
    ids = list(range(11))
    assert torch.equal(
        lm.rolling_logprobs_sync(ids), mock().rolling_logprobs_sync(ids, max_length=4)
    )
    for window, said in (
        ({"max_length": 5}, "max_length=5 exceeds the 4 tokens"),
        ({"context_len": 5}, "context_len=5 exceeds the 4 tokens of a window"),
        ({"keep": 4}, "context_len=1 and keep=4 exceed the 4 tokens of a window"),
        ({"keep": -1}, "keep must be an integer of at least 0"),
        ({"context_len": 0}, "context_len must be an integer of at least 1"),
    ):
        with pytest.raises(InvalidOptionError, match=said):
            lm.rolling_logprobs_sync(ids, **window)
    with pytest.raises(InvalidQueryError, match="the text is empty"):
        lm.rolling_logprobs_sync([])
