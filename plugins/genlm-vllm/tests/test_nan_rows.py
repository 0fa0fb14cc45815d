"""Rows that are NaN, of a token whose state is. On a CPU, vLLM's attention also reads places behind
the end of a context, where state with NaN of an earlier context may be."""

from __future__ import annotations

import random

import pytest
import torch

from genlm.core import Query
from genlm.vllm import AsyncVirtualLM
from tests.nan_rows import BAD, NanRows, damage, reference_of, text

from .driven import SMALL


@pytest.fixture(scope="module")
def reference(bytes_path):
    return reference_of(bytes_path)


@pytest.fixture(scope="module", params=[True, False], ids=["live", "not live"])
def lm(bytes_path, request):
    with AsyncVirtualLM.from_name(
        bytes_path, engine_opts=SMALL, live_sessions=request.param, cache_size=0
    ) as lm:
        damage(lm.underlying_model)
        yield lm


class TestNanRows(NanRows):
    native_scores = 2


def test_nan_that_a_dropped_request_left_behind_spoils_no_row(bytes_path, load_briefly, reference):
    """Nobody has seen its row, so the first one that is spoilt by its state is computed again."""
    engine, source = load_briefly(bytes_path), random.Random(1)
    damage(engine.model)
    prompt = text(source, 100)
    broken = Query((*prompt, BAD, *text(source, 90)))
    assert engine.step(broken) == engine.step() == {}, "two of its three parts are computed"
    engine.step(dropped=[broken])
    for length in (40, 70, 100, 101, 130):
        ids = [*prompt, *text(source, 40)][:length]
        (row,) = engine.ask(Query(tuple(ids)))
        torch.testing.assert_close(row, reference(ids), atol=5e-4, rtol=0)
