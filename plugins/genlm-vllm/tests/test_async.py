"""Asynchronous scheduling: vLLM plans a step while the one before runs.

vLLM turns it off on a CPU. Here it stays on, and CUDA's streams and events do nothing, as befits a
CPU, where all is done in order. So everything but them is vLLM's own.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch

from genlm.core.types import Query, SampleRequest, SamplingParams

TEXT = tuple(random.Random(1).choices(range(1000, 40000), k=200))


class Nothing:
    """A stream or an event."""

    device = torch.device("cpu")

    def __init__(self, *given, **options):
        pass

    def record(self, *given):
        pass

    wait_stream = synchronize = record


@pytest.fixture(scope="module")
def engine(load_engine):
    from vllm.platforms.cpu import CpuPlatform

    usual = CpuPlatform.check_and_update_config

    def but_asynchronous(vllm_config):
        usual(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuPlatform, "check_and_update_config", staticmethod(but_asynchronous))
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, Nothing)
        patch.setattr(torch, "Event", Nothing)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        yield load_engine(async_scheduling=True)


def cold(engine, queries):
    return [engine.ask(Query(query.token_ids, cold=True))[0] for query in queries]


def test_it_is_on(engine):
    """Else the step that takes a request would answer it."""
    query = Query(TEXT[:5])
    assert engine.step(query) == {}
    assert list(engine.step()) == [query]


def test_rows_of_sessions_that_grow_and_fork_are_the_cold_ones(engine):
    """Beside a draw whose next step is always planned before its token is known."""
    dice = random.Random(2)
    draw = SampleRequest(Query(TEXT[50:60]), SamplingParams(max_tokens=20, temperature=0.0))
    known, answers = [TEXT[:3], TEXT[:90]], engine.step(draw)
    for _ in range(3):
        grown = [ids + tuple(dice.choices(TEXT, k=dice.choice([1, 1, 70]))) for ids in known]
        forked = (*known[0], 7)
        batch = [Query(ids) for ids in dict.fromkeys([*grown, forked]) if len(ids) < 250]
        asked, known = engine.step(*batch), [query.token_ids for query in batch]
        while not asked.keys() >= set(batch):
            asked |= engine.step()
        answers |= asked
    while draw not in answers:
        answers |= engine.step()
    assert answers.pop(draw) == engine.draw([draw.query], [draw.params])[0]
    assert len(answers) > 6
    for row, right in zip(answers.values(), cold(engine, answers), strict=True):
        torch.testing.assert_close(row, right, atol=5e-4, rtol=0)


def test_forks_compute_a_token_each(engine):
    parent = TEXT[:50]
    engine.ask(Query(parent))
    forks = [Query((*parent, token)) for token in (5, 6, 7)]
    with engine.computed_tokens() as counts:
        rows = engine.ask(*forks)
    # vLLM has planned a further step of each before its token is known.
    assert counts[0] == 3
    engine.assert_cold_rows(dict(zip(forks, rows, strict=True)))


def test_what_is_dropped_between_two_steps_is_never_answered(engine):
    long = SampleRequest(Query(TEXT[:20]), SamplingParams(max_tokens=100, temperature=0.0))
    for newcomers in ([long], [], [], []):
        assert engine.step(*newcomers) == {}
    query = Query(TEXT[20:40])
    answers = engine.step(query, dropped=[long])
    while query not in answers:
        answers |= engine.step()
    assert list(answers) == [query]
    torch.testing.assert_close(answers[query], cold(engine, [query])[0], atol=5e-4, rtol=0)
    engine.genlm_clear_kv_cache()
