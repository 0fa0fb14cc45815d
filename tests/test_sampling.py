from __future__ import annotations

import asyncio

import pytest
import torch

from genlm.core import AsyncLM, EngineError, InvalidQueryError, MockAsyncLM, SamplingParams
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
@pytest.mark.parametrize(
    "row", [torch.full((3,), -float("inf")), torch.tensor([0.0, float("nan"), -1.0])]
)
def test_a_row_without_mass_is_an_error(row, temperature):
    with pytest.raises(EngineError, match="no mass, or a NaN"):
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
    with pytest.raises(ValueError, match="the continuation is empty"):
        asyncio.run(few.sequence_logprobs([1], []))


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
