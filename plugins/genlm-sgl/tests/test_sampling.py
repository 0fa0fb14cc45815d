"""What SGLang draws itself is what the core would draw from its rows; what it cannot draw so, it leaves to the core."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from genlm.core import Query, SamplingParams
from genlm.sgl.engine import load

END = 256


@pytest.fixture(scope="module")
def engine(tiny_without_padding):
    engine = load(tiny_without_padding, {"engine_opts": {"max_total_tokens": 600, "max_running_requests": 16}})
    yield engine
    engine.genlm_close()


def ask(engine, context):
    (answer,) = engine.genlm_step([Query(tuple(context))])
    return answer.row


def draw(engine, contexts, **params):
    return engine.genlm_sample([Query(context) for context in contexts], [SamplingParams(**params)] * len(contexts))


def test_temperature_zero_is_argmax(engine, contexts):
    asked = contexts(6, 3, 20)
    for context, drawn in zip(asked, draw(engine, asked, max_tokens=8, temperature=0.0), strict=True):
        assert len(drawn) == 8
        for i, token in enumerate(drawn):
            row = ask(engine, [*context, *drawn[:i]])
            assert row[token] >= row.max() - 1e-4


@pytest.mark.parametrize("cut", [{}, {"temperature": 2.0}, {"top_k": 3}, {"top_p": 0.5, "temperature": 0.5}])
def test_frequencies_are_those_of_the_row(engine, contexts, cut):
    (context,), draws = contexts(1, 10, 10), 3000
    mass = (ask(engine, context).double() / cut.get("temperature", 1.0)).softmax(dim=0)
    order = mass.argsort(descending=True)
    kept = cut.get("top_k", len(mass))
    if "top_p" in cut:
        kept = int((mass[order].cumsum(dim=0) < cut["top_p"]).sum()) + 1
    expected = torch.zeros_like(mass)
    expected[order[:kept]] = mass[order[:kept]]
    expected *= draws / expected.sum()
    torch.manual_seed(0)
    seen = Counter(token for (token,) in draw(engine, [context] * draws, max_tokens=1, **cut))
    observed = torch.tensor([float(seen[token]) for token in range(len(mass))])
    assert observed[expected == 0].sum() == 0
    cells = expected >= 5
    chi2 = ((observed - expected)[cells] ** 2 / expected[cells]).sum().item()
    degrees = int(cells.sum())
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5


def test_stop_tokens_end_the_draw_and_are_not_in_it(engine, contexts):
    asked = contexts(40, 3, 20)
    stops = frozenset({END, *range(64)})
    drawn = draw(engine, asked, max_tokens=12, stop_token_ids=stops)
    assert all(not stops & set(ids) for ids in drawn)
    assert len({len(ids) for ids in drawn}) > 2


def test_the_end_does_not_stop_unless_it_is_listed(engine, contexts):
    asked = contexts(40, 3, 20)
    drawn = draw(engine, asked, max_tokens=12, temperature=100.0)  # hardly any token is unlikely
    assert {len(ids) for ids in drawn} == {12}
    assert draw(engine, asked, max_tokens=12, stop_token_ids=frozenset({5})) is None


def test_more_draws_than_the_pool_holds(engine, contexts):
    asked = contexts(40, 60, 80)
    drawn = draw(engine, asked, max_tokens=60)
    assert [len(ids) for ids in drawn] == [60] * 40


def test_questions_after_draws_are_right(engine, contexts):
    asked = contexts(4, 10, 20)
    before = [ask(engine, context) for context in asked]
    draw(engine, asked, max_tokens=5, temperature=3.0)
    for row, context in zip(before, asked, strict=True):
        torch.testing.assert_close(ask(engine, context), row, atol=1e-4, rtol=0)


def test_seeds_and_both_cuts_are_left_to_the_core(engine, contexts):
    asked = contexts(2, 3, 20)
    assert draw(engine, asked, max_tokens=2, seed=1) is None
    assert draw(engine, asked, max_tokens=2, top_k=5, top_p=0.5) is None
