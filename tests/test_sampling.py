from __future__ import annotations

import asyncio
import math

import pytest
import torch

from genlm.core import AsyncLM, EngineError, InvalidQueryError, MockAsyncLM, SamplingParams
from genlm.core.generation import PREFIXES
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.sampling import TokenDrawer, seed_of


class FewTokens(MockAsyncLM):
    """The same four tokens in every context, and no native sampler."""

    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])

    def _get_logprobs(self, token_ids):
        row = torch.full((258,), -float("inf"))
        row[[10, 20, 30, 257]] = self.probabilities.log()
        return row


@pytest.fixture(params=["native", "core"])
def few(request, mock, monkeypatch):
    """The mock with its own sampler, and with the core's."""
    if request.param == "core":
        monkeypatch.delattr(MockEngine, "genlm_sample")
    return mock(FewTokens)


def draw(lm, *arguments, **options):
    return asyncio.run(lm.sample(*arguments, **options))


def test_a_seed_fixes_the_result_whatever_else_is_in_the_batch(few):
    async def together():
        others = [few.sample([7, i], 12, [257], seed=i) for i in range(5)]
        return (await asyncio.gather(few.sample([1], 12, [257], seed=3), *others))[0]

    alone = draw(few, [1], 12, [257], seed=3)
    assert asyncio.run(together()) == alone
    assert asyncio.run(few.batch_sample([[1], [2]], 12, [257], seed=3))[0] == alone
    assert asyncio.run(few.batch_sample([[1], [9]], 12, [257], seed=3))[0] == alone


def test_prompts_of_a_seeded_batch_have_streams_of_their_own(few):
    drawn = asyncio.run(few.batch_sample([[1]] * 20, 8, [], seed=0))
    assert len({tuple(ids) for ids in drawn}) > 10
    assert len({seed_of(seed, i) for seed in range(20) for i in range(20)}) == 400


def test_without_a_seed_draws_differ(few):
    drawn = asyncio.run(few.batch_sample([[1]] * 20, 8, []))
    assert len({tuple(ids) for ids in drawn}) > 10


def test_temperature_zero_is_argmax(few):
    assert draw(few, [1], 5, [], temperature=0) == [10] * 5


def test_the_stop_token_ends_and_is_left_out(few):
    assert draw(few, [1], 100, [10], temperature=0) == []
    ids = draw(few, [1], 500, [257], seed=1)
    assert 257 not in ids
    assert len(ids) < 500
    assert 257 in draw(few, [1], 500, [], seed=1)


def test_max_tokens(few, gate):
    assert draw(few, [1], 0, []) == []
    assert gate.batches == []
    assert len(draw(few, [1], 3, [])) == 3


def test_frequencies_agree_with_the_row(few):
    n = 4000
    drawn = [ids[0] for ids in asyncio.run(few.batch_sample([[1]] * n, 1, [], seed=0))]
    for token_id, probability in zip([10, 20, 30, 257], [0.5, 0.3, 0.15, 0.05], strict=True):
        error = (probability * (1 - probability) / n) ** 0.5
        assert abs(drawn.count(token_id) / n - probability) < 5 * error


def test_top_k_and_top_p(few):
    assert set(draw(few, [1], 300, [], seed=0, top_k=2)) == {10, 20}
    assert set(draw(few, [1], 300, [], seed=0, top_p=0.8)) == {10, 20}
    assert set(draw(few, [1], 300, [], seed=0, top_p=0.81)) == {10, 20, 30}
    assert set(draw(few, [1], 300, [], seed=0, top_p=1e-9)) == {10}
    assert set(draw(few, [1], 300, [], seed=0, top_k=3, top_p=1.0)) == {10, 20, 30}


def test_temperature_sharpens(few):
    assert draw(few, [1], 300, [], seed=0, temperature=0.01) == [10] * 300
    flat = draw(few, [1], 2000, [], seed=0, temperature=1e6)
    assert all(400 < flat.count(token_id) < 600 for token_id in (10, 20, 30, 257))


def test_a_token_without_mass_is_never_drawn():
    drawer = TokenDrawer(SamplingParams(max_tokens=1, seed=0))
    row = torch.full((1000,), -float("inf"))
    row[[3, 500]] = torch.tensor([0.5, 0.5]).log()
    assert {drawer.draw(row) for _ in range(2000)} == {3, 500}


def test_a_tie_at_temperature_zero_goes_to_the_lowest_id():
    assert (
        TokenDrawer(SamplingParams(max_tokens=1, temperature=0)).draw(
            torch.tensor([-2.0, -1.0, -1.0])
        )
        == 1
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", [[-math.inf] * 3, [0.0, math.nan, -1.0], [0.0, math.inf, -1.0]])
def test_a_row_without_mass_is_an_error(values, temperature):
    row = torch.tensor(values)
    with pytest.raises(EngineError, match=r"no mass, or a NaN or \+inf"):
        TokenDrawer(SamplingParams(max_tokens=1, temperature=temperature, seed=0)).draw(row)


@pytest.mark.filterwarnings("error")
def test_the_least_temperature_is_argmax(few):
    assert draw(few, [1], 3, [], temperature=5e-324) == [10] * 3


def test_a_failed_prompt_ends_the_draws_of_the_others(mock, monkeypatch, gate):
    monkeypatch.delattr(MockEngine, "genlm_sample")
    lm = mock(fail_on=lambda query: query.token_ids[0] == 13)

    async def ask():
        with pytest.raises(EngineError):
            await lm.batch_sample([[1], [13]], 1000, [])
        await asyncio.sleep(0)
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    assert asyncio.run(ask()) == []


def test_sequence_logprobs(few):
    scores = asyncio.run(few.sequence_logprobs([1], [10, 30]))
    assert torch.allclose(scores, torch.tensor([0.5, 0.15]).log())


def test_a_token_that_rows_have_no_place_for_is_no_continuation():
    class Padded(MockEngine):
        def __init__(self):
            super().__init__(ByteTokenizer())
            self.vocab_size = 264

    with AsyncLM(Padded, backend="padded") as lm, pytest.raises(InvalidQueryError, match="260"):
        asyncio.run(lm.sequence_logprobs([1], [260]))


def test_scores_by_rows_and_native_scores_agree(mock, monkeypatch):
    native = asyncio.run(mock().sequence_logprobs([1, 2], [3, 4, 5]))
    monkeypatch.delattr(MockEngine, "genlm_sequence_logprobs")
    assert torch.equal(asyncio.run(mock().sequence_logprobs([1, 2], [3, 4, 5])), native)


def test_scores_by_rows_ask_few_contexts_at_a_time(mock, monkeypatch, gate):
    """Every prefix may take key/value state as large as the whole context's."""
    native = asyncio.run(mock().sequence_logprobs([1, 2], range(150)))
    monkeypatch.delattr(MockEngine, "genlm_sequence_logprobs")
    gate.batches.clear()
    scores = asyncio.run(mock().sequence_logprobs([1, 2], range(150)))
    assert torch.equal(scores, native)
    assert sum(map(len, gate.batches)) == 150
    assert max(map(len, gate.batches)) <= PREFIXES


# --- filters --------------------------------------------------------------------------------------


def drawable(row, **options):
    """The ids that are drawn, each with the probability that the drawer says it had."""
    drawer = TokenDrawer(SamplingParams(max_tokens=1, seed=0, **options))
    found = {}
    for _ in range(1000):
        before, token_id = drawer.proposal_logprob, drawer.draw(row)
        found[token_id] = math.exp(drawer.proposal_logprob - before)
    return found


def by_hand(row, temperature=1.0, top_k=None, top_p=None, min_p=None):
    """Temperature, then top_k, then top_p of what remains, then min_p: token by token."""
    weights = {i: math.exp(float(x) / temperature) for i, x in enumerate(row)}
    kept = sorted(weights, key=lambda i: (-float(row[i]), i))[:top_k]
    if top_p is not None:
        whole, mass, few = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if mass >= top_p * whole:
                break
            few.append(i)
            mass += weights[i]
        kept = few
    if min_p is not None:
        kept = [i for i in kept if weights[i] >= min_p * max(weights.values())]
    return {i: weights[i] / sum(weights[j] for j in kept) for i in kept}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 2, 4])
@pytest.mark.parametrize("top_p", [None, 0.3, 0.75])
@pytest.mark.parametrize("min_p", [None, 0.2])
def test_filters_apply_in_the_stated_order(temperature, top_k, top_p, min_p):
    row = torch.tensor([0.05, 0.35, 0.1, 0.27, 0.23]).log()
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert drawable(row, **options) == pytest.approx(by_hand(row, **options))


def test_the_order_of_top_k_and_top_p_matters():
    """Of the two most likely tokens, 0.4 and 0.3, the first has more than half of their mass."""
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert drawable(row, top_k=2, top_p=0.55).keys() == {0}
    assert drawable(row, top_p=0.55).keys() == {0, 1}


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_extreme_temperatures_keep_the_most_likely_tokens(temperature):
    """Their weights are all rounded to 1."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.3]).log()
    assert drawable(row, temperature=temperature, top_k=2).keys() == {2, 3}


def test_min_p_is_drawn_by_the_core(mock):
    lm = mock(FewTokens)
    drawn = draw(lm, [1], 200, [], seed=0, min_p=0.5)  # half of 0.5: 0.25
    assert set(drawn) == {10, 20}
