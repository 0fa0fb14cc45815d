"""examples/next_bytes.py: over a byte tokenizer, its output can be computed by hand."""

from __future__ import annotations

import asyncio

import pytest

pytestmark = pytest.mark.any_version


def test_next_bytes_sum_over_tokenisations(example, lm):
    compared = asyncio.run(example("next_bytes").compare(lm, "x", ["a", "ab"]))
    ((token, exact), (longer, both)) = compared
    row = lm.next_token_logprobs_sync([*b"x"]).exp()
    after = lm.next_token_logprobs_sync([*b"xa"]).exp()
    assert token == pytest.approx(float(row[ord("a")]), rel=1e-6)
    assert exact == pytest.approx(token, rel=1e-6)
    assert longer == 0.0
    assert both == pytest.approx(float(row[ord("a")] * after[ord("b")]), rel=1e-5)


def test_example_runs_on_the_mock(run_on_the_mock) -> None:
    assert "' a'" in run_on_the_mock("next_bytes", " a")
