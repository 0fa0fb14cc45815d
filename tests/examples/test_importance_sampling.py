"""examples/importance_sampling.py, against sums that are small enough to be exact."""

from __future__ import annotations

import asyncio
import math

import pytest

from genlm.core import MockAsyncLM

pytestmark = pytest.mark.any_version

VOCAB = [b"a", b"b", b"ab", b"ba", b"<end>", b"<pad>", b"c"]
PROMPT = [0, 6]


class Tokenizer:
    eos_token_id = 4
    all_special_ids = (4, 5)

    def __len__(self):
        return len(VOCAB)

    def token_bytes(self):
        return VOCAB


@pytest.fixture(scope="module")
def program(example):
    pytest.importorskip("regex", reason="the example matches with the package regex")
    return example("importance_sampling")


@pytest.fixture
def lm():
    with MockAsyncLM(Tokenizer()) as lm:
        yield lm


def exact(lm, text=b"", ids=(), steps=4):
    """The probability of ending, within ``steps`` tokens, with a text of one to three a's or b's,
    the first of them an a."""
    row = lm.next_token_logprobs_sync([*PROMPT, *ids]).double().exp()
    total = float(row[4]) if text[:1] == b"a" and len(text) <= 3 else 0.0
    for i, token in enumerate(VOCAB[:4]):
        longer = text + token
        if steps > 1 and longer[:1] == b"a" and len(longer) <= 3:
            total += float(row[i]) * exact(lm, longer, (*ids, i), steps - 1)
    return total


def test_allowed_tokens_keep_a_match_possible(program, lm):
    constraint = program.Constraint(lm, r"a[ab]{0,2}")
    assert sorted(constraint.allowed(b"").tolist()) == [0, 2]
    assert sorted(constraint.allowed(b"a").tolist()) == [0, 1, 2, 3, 4]
    assert sorted(constraint.allowed(b"ab").tolist()) == [0, 1, 4]
    assert constraint.allowed(b"aba").tolist() == [4]


def test_names_of_special_tokens_are_not_text(program, lm):
    constraint = program.Constraint(lm, r".*")
    assert sorted(constraint.allowed(b"x").tolist()) == [0, 1, 2, 3, 4, 6]


def test_the_mean_weight_is_the_probability_of_a_match(program, lm):
    constraint = program.Constraint(lm, r"a[ab]{0,2}")
    draws = asyncio.run(program.draw_many(lm, PROMPT, constraint, 4, n=3000, seed=1))
    found = program.estimate(draws)
    ratio = math.exp(found.log_probability) / exact(lm)
    assert 0 < found.relative_error < 0.05
    assert ratio == pytest.approx(1, abs=4 * found.relative_error)
    assert 1 < found.effective_size < 3000


def test_the_figures_of_an_estimate(program):
    draws = [program.Draw(b"", math.log(w)) for w in (1.0, 2.0, 3.0)]
    draws.append(program.Draw(b"", -math.inf))
    found = program.estimate(draws)
    assert found.log_probability == pytest.approx(math.log(6 / 4))
    deviation = math.sqrt((0.25 + 0.25 + 2.25 + 2.25) / 3)
    assert found.relative_error == pytest.approx(deviation / 2 / 1.5)
    assert found.effective_size == pytest.approx(36 / 14)
    assert program.estimate(draws[3:]).effective_size == 0.0


def test_text_that_does_not_end_in_time_has_weight_zero(program, lm):
    constraint = program.Constraint(lm, r"[ab]{9,}")
    (only,) = asyncio.run(program.draw_many(lm, PROMPT, constraint, 3, n=1, seed=0))
    assert only.log_weight == -math.inf


def test_example_runs_on_the_mock(program, run_on_the_mock) -> None:
    printed = run_on_the_mock("importance_sampling", "--pattern", "[a-c]+", "--samples", "40")
    assert "effective sample size" in printed
