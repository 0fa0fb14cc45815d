"""Sessions that stay running requests of vLLM: what an extension costs, that its rows equal cold
ones, and that sessions pause if they cannot keep running."""

from __future__ import annotations

import random
import sys

import pytest
from structlog.testing import capture_logs

from genlm.core.types import Query, SampleRequest, SamplingParams
from genlm.vllm import runner_tokens, running
from genlm.vllm.running import RunningSessions
from genlm.vllm.sessions import Sessions

from .driven import random_program, text


def joined(engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests enter vLLM's batch where four contexts are extended."""
    from vllm.v1.worker.gpu.states import RequestState
    from vllm.v1.worker.gpu_input_batch import InputBatch

    entered = []

    def counted(usual):
        def add_request(self, *given, **named):
            entered.append(self)
            return usual(self, *given, **named)

        return add_request

    contexts = [text(seed, 12) for seed in range(4)]  # computed in one step
    engine.ask(*map(Query, contexts))
    with monkeypatch.context() as patch:
        for batch in (InputBatch, RequestState):  # of the model runners V1 and V2
            patch.setattr(batch, "add_request", counted(batch.add_request))
        engine.ask(*(Query((*ids, 7)) for ids in contexts))
    return len(entered)


def test_an_extended_session_stays_in_the_batch(engine, monkeypatch):
    assert joined(engine, monkeypatch) == 0


def our_lines(engine, queries) -> int:
    """How many lines of this repository's Python run where queries are asked."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        if not frame.f_globals.get("__name__", "").startswith("genlm."):
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        engine.ask(*queries)
    finally:
        sys.settrace(before)
    return count


def test_an_extension_runs_a_hundred_lines_of_our_python(engine):
    """They are the host's time of a step beside vLLM's own."""
    counts = []
    for n in (2, 10):
        queries = [Query(text(seed, 8)) for seed in range(n)]
        engine.ask(*queries)
        counts.append(our_lines(engine, [query.extended((7,)) for query in queries]))
        engine.genlm_clear_kv_cache()
    assert 60 < (counts[1] - counts[0]) / 8 <= 125


def test_a_fork_runs_two_hundred_lines_of_our_python(engine):
    """Its source is the session that another request of the step extends."""
    counts = []
    for n in (3, 7):
        queries = [Query(text(seed, 8)) for seed in range(n)]
        engine.ask(*queries)
        forks = [query.extended((token,)) for query in queries for token in (7, 8)]
        counts.append(our_lines(engine, forks))
        engine.genlm_clear_kv_cache()
    assert 100 < (counts[1] - counts[0]) / 4 - 100 <= 240


@pytest.mark.parametrize("seed", range(2))
def test_random_programs_in_a_small_cache(engine, seed):
    random_program(engine, random.Random(seed)).run(40)


def test_random_programs_with_adapters(lora_engine, write_adapter, monkeypatch):
    folders = {name: write_adapter(name, seed=ord(name)) for name in "ab"}
    program = random_program(lora_engine, random.Random(9), adapters=folders)
    program.adapt()
    program.run(30)
    program.leave()
    assert joined(lora_engine, monkeypatch) == 0


def test_idle_sessions_that_vllm_preempts_are_right_when_they_are_extended(engine, monkeypatch):
    """Samples that need room take it from the sessions that came after them. So that they must,
    none is released before. Some are extended while they wait for room, some after they came
    again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    usual, preempted = Scheduler._preempt_request, []

    def preempt(self, request, *given, **options):
        preempted.append(request.request_id)
        return usual(self, request, *given, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    monkeypatch.setattr(Sessions, "trim", lambda self, in_flight: [])
    greedy = SamplingParams(max_tokens=190, temperature=0.0)
    draws = [SampleRequest(Query(text(50 + n, 60)), greedy) for n in range(3)]
    known = [text(n, 70) for n in range(5)]
    engine.step(*draws)
    rows, asked = {}, set(map(Query, known))
    rows |= engine.step(*asked)
    while not rows.keys() >= asked:
        rows |= engine.step()
    while not preempted:
        rows |= engine.step()
    early = [Query((*ids, 5)) for ids in known[:3]]
    rows |= engine.step(*early)
    while not rows.keys() >= {*draws, *early}:
        rows |= engine.step()
    late = [Query((*ids, 6, 7)) for ids in known[3:]] + [Query((*ids, 5, 8)) for ids in known[:3]]
    rows |= dict(zip(late, engine.ask(*late), strict=True))
    monkeypatch.undo()
    drawn = {draw: rows.pop(draw) for draw in draws}
    engine.genlm_clear_kv_cache()
    engine.assert_cold_rows(rows)
    assert [drawn[draw] for draw in draws] == engine.ask(*draws), "these fit in the cache"


def test_a_session_that_vllm_is_computing_again_takes_a_token(load_briefly, monkeypatch):
    """A preempted session is computed again in chunks. It is extended when a part of it is
    computed, and a chunk ends at its former end. There vLLM draws a token in place of the known
    one."""
    from vllm.v1.request import Request

    usual, extended = Request.append_output_token_ids, []

    def append(self, token_ids):
        extended.append((self.num_computed_tokens, self.num_tokens))
        return usual(self, token_ids)

    engine = load_briefly(
        max_model_len=128,
        max_num_batched_tokens=48,
        num_gpu_blocks_override=12,
        enable_prefix_caching=False,
    )
    monkeypatch.setattr(Sessions, "trim", lambda self, in_flight: [])
    draw = SampleRequest(Query(text(50, 44)), SamplingParams(max_tokens=24, temperature=0.0))
    known = [text(n, 95) for n in range(3)]
    rows = engine.step(draw)
    waits = {draw, *map(Query, known)}
    rows |= engine.step(*map(Query, known))
    while not rows.keys() >= waits:  # the sample takes room from the last session
        rows |= engine.step()
    monkeypatch.setattr(Request, "append_output_token_ids", append)
    longer = [Query((*ids, 5)) for ids in known]
    for query in (longer[0], longer[2], longer[1]):
        rows |= engine.step(query)
        while query not in rows:
            rows |= engine.step()
    assert (47, 95) in extended, "beside the first, a step computes 47 tokens of the last"
    longest = [Query((*ids, 5, 7, 8)) for ids in known]
    rows |= dict(zip(longest, engine.ask(*longest), strict=True))
    del rows[draw]
    monkeypatch.undo()
    engine.genlm_clear_kv_cache()
    engine.assert_cold_rows(rows)


def test_sessions_pause_if_vllm_lacks_a_name_or_rows_differ(load_briefly, monkeypatch):
    """If vLLM has all needed names, a row of an extended session is compared with the cold one."""

    def extend(self, request_id, token_ids):
        usual(self, request_id, [token_id + 1 for token_id in token_ids])

    usual = RunningSessions.extend
    with capture_logs() as logs:
        with monkeypatch.context() as patch:
            patch.setattr(runner_tokens, "V1_NAMES", ("requests", "input_batch.unheard_of"))
            engine = load_briefly()
        monkeypatch.setattr(RunningSessions, "extend", extend)
        engine.prove()
        assert (
            running.running_sessions(None, 0, list) is None
        )  # the engine core is in another process
    lacks, differs, elsewhere = [
        each["reason"] for each in logs if each["event"] == "vllm.sessions_pause"
    ]
    assert "a process of its own" in elsewhere
    assert "input_batch.unheard_of" in lacks
    assert "apart" in differs
    assert joined(engine, monkeypatch) == 4
    random_program(engine, random.Random(3)).run(15)
