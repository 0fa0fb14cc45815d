"""Samples and scores from rows, for engines without their own. The conformance suite, which also
runs on the mocks, tests that samples agree with rows, and the effect of options and seeds."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch

from genlm.core import AsyncLM, EngineError, InvalidQueryError, SamplingParams, drawer
from genlm.core.drawer import TokenDrawer, draw_together
from genlm.core.generation import MAX_PREFIXES_AT_ONCE
from genlm.core.mock import MockEngine
from genlm.core.sampling import seed_of
from tools.launched import Launched
from tools.transfers import Transfers

from .conftest import gathered
from .doubles import Processor, padded


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_k": 50},
        {"top_p": 0.5},
        {"eos_token_ids": range(30)},
    ],
)
def test_core_and_native_sampler_draw_the_same(mock, monkeypatch, gate, how):
    prompts = [[1], [1], [2, 3]]
    how = {"eos_token_ids": [], "seed": 3, **how}
    native = mock().batch_sample_sync(prompts, 12, **how)
    assert len(gate.batches) == 1
    monkeypatch.delattr(MockEngine, "genlm_sample")
    lm = mock()
    assert lm.batch_sample_sync(prompts, 12, **how) == native
    assert lm.sample_sync([1], 12, **how) == native[0]
    assert len(gate.batches) > 2


def test_sampling_no_tokens_requests_nothing(mock, gate):
    assert mock().sample_sync([1], 0, []) == []
    assert gate.batches == []


def test_places_in_batches_have_seeds_of_their_own():
    assert len({seed_of(seed, i) for seed in range(20) for i in range(20)}) == 400


@pytest.mark.parametrize("temperature", [5e-324, 1e-3])
def test_the_least_temperature_is_argmax(temperature):
    drawer = TokenDrawer(SamplingParams(max_tokens=1, temperature=temperature, seed=0))
    with np.errstate(all="raise"):  # a program may have set this
        assert [drawer.draw(torch.tensor([-2.0, -1.0, -1.5])) for _ in range(3)] == [1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("values", [[-math.inf] * 3, [0.0, math.nan, -1.0], [0.0, math.inf, -1.0]])
def test_a_row_without_mass_is_an_error(values, temperature):
    row = torch.tensor(values)
    with pytest.raises(EngineError, match=r"no mass, or a NaN or \+inf"):
        TokenDrawer(SamplingParams(max_tokens=1, temperature=temperature, seed=0)).draw(row)


def test_a_token_that_rows_have_no_place_for_is_no_continuation():
    lm = AsyncLM(lambda: padded(MockEngine, 264), backend="padded")
    with lm, pytest.raises(InvalidQueryError, match="260"):
        lm.sequence_logprobs_sync([1], [260])


def test_scores_from_rows_request_few_contexts_at_a_time(mock, monkeypatch, gate):
    """Every prefix may take key/value state as large as the whole context's."""
    count = 2 * MAX_PREFIXES_AT_ONCE + 6
    native = mock().sequence_logprobs_sync([1, 2], range(count))
    monkeypatch.delattr(MockEngine, "genlm_sequence_logprobs")
    gate.batches.clear()
    assert torch.equal(mock().sequence_logprobs_sync([1, 2], range(count)), native)
    assert sum(map(len, gate.batches)) == count
    assert max(map(len, gate.batches)) <= MAX_PREFIXES_AT_ONCE


# --- many samples together ------------------------------------------------------------------------


def drawers_of(count, **options):
    return [TokenDrawer(SamplingParams(max_tokens=1, seed=i, **options)) for i in range(count)]


@pytest.fixture
def rows():
    return torch.randn(30, 1000, generator=torch.Generator().manual_seed(0)).log_softmax(-1)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("at_once", [1, 7000, 1 << 20])
def test_draws_made_together_equal_draws_made_alone(monkeypatch, rows, on_cpu, at_once):
    """They may have any options, and a row without mass may be among them."""
    hows = [{}, {"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}]
    rows[4] = -math.inf

    def all_drawers():
        return [drawers_of(i + 1, **hows[i % len(hows)])[i] for i in range(len(rows))]

    alone = all_drawers()
    expected = [None if i == 4 else one.draw(rows[i]) for i, one in enumerate(alone)]
    monkeypatch.setattr(drawer, "on_cpu", lambda device: on_cpu)
    monkeypatch.setattr(drawer, "CPU_CHUNK_NUMBERS", at_once)
    monkeypatch.setattr(drawer, "DEVICE_CHUNK_NUMBERS", at_once)
    together = all_drawers()
    drawn = draw_together(together, list(rows))
    assert isinstance(drawn.pop(4), EngineError)
    assert drawn == expected[:4] + expected[5:]
    for one, other in zip(together, alone, strict=True):
        assert one.logprob == pytest.approx(other.logprob)
        assert one.proposal_logprob == pytest.approx(other.proposal_logprob)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.0}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}],
)
def test_kernels_of_sampling_do_not_depend_on_the_number_of_rows(monkeypatch, rows, options):
    monkeypatch.setattr(drawer, "on_cpu", lambda device: False)
    counts = []
    for count in (3, 30):
        with Launched() as launched:
            draw_together(drawers_of(count, **options), list(rows[:count]))
        counts.append(launched.count)
    assert counts[0] == counts[1]
    assert 9 <= counts[0] <= 40, "what CONTRIBUTING.md says"


@pytest.mark.parametrize("count", [5, 30])
@pytest.mark.parametrize("at_once", [3000, 1 << 20])
def test_a_gpu_is_waited_for_once_for_draws_of_several_kinds(monkeypatch, rows, count, at_once):
    """And gets their numbers in one copy, however many rows are worked on at a time."""
    monkeypatch.setattr(drawer, "on_cpu", lambda device: False)
    monkeypatch.setattr(drawer, "DEVICE_CHUNK_NUMBERS", at_once)
    hows = [{}, {"temperature": 0.0}, {"temperature": 0.5}, {"min_p": 0.1}]
    drawers = [drawers_of(1, **hows[at % len(hows)])[0] for at in range(count)]
    with Transfers() as transfers:
        draw_together(drawers, list(rows[:count]))
    assert (transfers.copies.total(), transfers.waits.total()) == (1, 1)


@pytest.mark.parametrize("options", [{"top_k": 20}, {"top_p": 0.7}])
def test_waits_for_a_gpu_do_not_depend_on_the_number_of_samples(monkeypatch, rows, options):
    monkeypatch.setattr(drawer, "on_cpu", lambda device: False)
    waits = []
    for count in (3, 30):
        with Transfers() as transfers:
            draw_together(drawers_of(count, **options), list(rows[:count]))
        waits.append(transfers.waits.total())
    assert waits[0] == waits[1] <= 3, "whether the likeliest suffice, and whether some are equal"


def test_inexact_sums_never_draw_a_token_without_mass(monkeypatch):
    monkeypatch.setattr(drawer, "on_cpu", lambda device: False)
    exact = torch.Tensor.cumsum

    def cumsum(self, dim):
        return exact(self, dim) + torch.arange(self.shape[-1]) * 1e-3

    monkeypatch.setattr(torch.Tensor, "cumsum", cumsum)
    row = torch.full((1000,), -math.inf)
    row[300] = 0.0
    assert set(draw_together(drawers_of(50), [row] * 50)) == {300}


def test_gathered_draws_are_made_together(mock, monkeypatch):
    """Samples drawn one by one use the same random numbers, and a failing one does not affect the
    others."""
    monkeypatch.delattr(MockEngine, "genlm_sample")
    calls = []

    def draw(drawers, rows):
        calls.append(len(drawers))
        if len(calls) == 1:
            [one.number() for one in drawers]
            raise MemoryError
        return draw_together(drawers, rows)

    def no_mass_after_3(queries, rows):
        rows[[query.token_ids == (3,) for query in queries]] = -math.inf
        return rows

    def drawn():
        lm = mock(wrappers=[Processor(no_mass_after_3)])
        return gathered(*(lm.sample([i], 2, [], seed=i) for i in range(8)))

    expected = drawn()
    assert [i for i, one in enumerate(expected) if isinstance(one, EngineError)] == [3]
    monkeypatch.setattr(drawer, "draw_together", draw)
    assert drawn()[4:] == expected[4:]
    assert calls == [8, *[1] * 8, 7]


async def test_draws_repeated_after_a_failure_use_the_same_random_numbers(mock, monkeypatch):
    """Samples with other options, which had already succeeded, count once too."""
    hows = [{}, {"top_k": 20}]

    async def drawn():
        lm = mock()
        asked = [lm.sample_particles([1], 1, 3, eos_token_ids=[], seed=5, **how) for how in hows]
        return await asyncio.gather(*asked)

    def failing_second(*args):
        calls.append(args)
        if len(calls) == 2:
            raise MemoryError
        return own(*args)

    calls, own = [], drawer._drawn
    expected = await drawn()
    monkeypatch.setattr(drawer, "_drawn", failing_second)
    assert await drawn() == expected


# --- filters --------------------------------------------------------------------------------------


def drawable(row, **options):
    """The drawn ids, each with the probability that the drawer reports."""
    drawers = drawers_of(500, **options)
    drawn = draw_together(drawers, [row] * 500)
    return {i: math.exp(one.proposal_logprob) for i, one in zip(drawn, drawers, strict=True)}


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


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 700},
        {"top_k": 5000},
        {"top_p": 0.4},
        {"top_p": 0.999},
        {"top_p": 1.0},
        {"top_k": 700, "top_p": 0.6, "temperature": 0.7},
        {"top_k": 700, "top_p": 0.6, "min_p": 1e-4},
        {"top_k": 1500, "top_p": 0.5, "temperature": 5.0},
    ],
)
@pytest.mark.parametrize("values", [7, 3000])
@pytest.mark.parametrize("on_cpu", [True, False])
def test_filters_of_a_whole_vocabulary_keep_the_right_tokens(monkeypatch, options, values, on_cpu):
    """Also where many tokens are equal, some of them impossible; and by the operations that a GPU
    would take."""
    monkeypatch.setattr(drawer, "on_cpu", lambda device: on_cpu)
    monkeypatch.setattr(drawer, "TOP_P_CANDIDATES", (4, 800))
    generator = torch.Generator().manual_seed(values)
    row = (torch.randint(values, [3000], generator=generator) * 10.0 / values).log_softmax(-1)
    row[::3] = -math.inf
    expected = by_hand(row, **options)
    drawn = drawable(row, **options)
    assert drawn == pytest.approx({i: expected[i] for i in drawn})


@pytest.mark.parametrize("temperature", [1e30, 1e300])
def test_extreme_temperatures_keep_the_most_likely_tokens(temperature):
    """Their weights are all rounded to 1."""
    row = torch.tensor([0.1, 0.2, 0.4, 0.3]).log()
    assert drawable(row, temperature=temperature, top_k=2).keys() == {2, 3}


def test_min_p_is_drawn_by_the_core(mock):
    lm = mock()
    row = lm.next_token_logprobs_sync([1])
    likely = (row >= row.max() + math.log(0.5)).nonzero().flatten().tolist()
    drawn = lm.batch_sample_sync([[1]] * 50, 1, [], seed=0, min_p=0.5)
    assert {ids[0] for ids in drawn} == set(likely)
    assert lm.stats.draws == 0, "what the engine has drawn"
