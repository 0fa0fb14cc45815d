"""Asynchronous scheduling on the model runner V1: vLLM plans a step while the previous one runs.

CUDA's streams and events are replaced by ones that do nothing, because a CPU works in order.
Everything else is vLLM's own.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from genlm.core.types import Query, SampleRequest, SamplingParams

from .driven import asynchronous_scheduling, random_program, text

TEXT = text(1, 50)


class Nothing:
    """A stream or an event of CUDA."""

    device = torch.device("cpu")

    def __init__(self, *given: object, **options: object) -> None:
        pass

    def record(self, *given: object) -> None:
        pass

    wait_stream = synchronize = record


@pytest.fixture(scope="module")
def engine(load_for_module):
    with asynchronous_scheduling(), pytest.MonkeyPatch.context() as patch:
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, Nothing)
        patch.setattr(torch, "Event", Nothing)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        yield load_for_module(async_scheduling=True)


def test_asynchronous_scheduling_is_on(engine):
    """Without asynchronous scheduling, the step that takes a request would answer it."""
    query = Query(TEXT[:5])
    assert engine.step(query) == {}
    assert list(engine.step()) == [query]


def test_random_programs(engine):
    """The next step of each sample is always planned before its token is known."""
    random_program(engine, random.Random(2)).run(15)


def test_forks_compute_a_token_each(engine):
    parent = TEXT
    engine.ask(Query(parent))
    forks = [Query((*parent, token)) for token in (5, 6, 7)]
    with engine.computed_tokens() as counts:
        rows = engine.ask(*forks)
    # vLLM has planned a further step of each request before its token is known.
    assert counts[0] == 3
    engine.assert_cold_rows(dict(zip(forks, rows, strict=True)))


def test_waiting_request_reuses_previous_step(engine):
    """The second step is planned while the first runs."""
    siblings = [Query((*text(77, 50), token)) for token in range(5, 10)]
    with engine.computed_tokens() as counts:
        rows = engine.ask(*siblings)
    assert counts[:2] == [51, 4]
    engine.assert_cold_rows(dict(zip(siblings, rows, strict=True)))


def test_request_dropped_between_two_steps_is_never_answered(engine):
    long = SampleRequest(Query(TEXT[:20]), SamplingParams(max_tokens=100, temperature=0.0))
    for new_requests in ([long], [], [], []):
        assert engine.step(*new_requests) == {}
    query = Query(TEXT[20:40])
    answers = engine.step(query, dropped=[long])
    while query not in answers:
        answers |= engine.step()
    assert list(answers) == [query]
    engine.assert_cold_rows(answers)
    engine.genlm_clear_kv_cache()
