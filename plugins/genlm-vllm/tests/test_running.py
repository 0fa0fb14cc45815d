"""Sessions that stay running requests of vLLM: what an extension costs, that its rows are the cold
ones, and that sessions pause where they cannot run on."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

import pytest
from structlog.testing import capture_logs

from genlm.core.types import Adapter, Query, SampleRequest, SamplingParams
from genlm.vllm import running
from genlm.vllm.running import RunningSessions
from genlm.vllm.sessions import Sessions

GREEDY = SamplingParams(max_tokens=190, temperature=0.0)


@pytest.fixture(scope="module")
def engine(load_engine):
    return load_engine()


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(1000, 40000), k=length))


def check_random_program(
    engine, seed: int, adapters: Sequence[Adapter | None] = (None,), steps: int = 25
) -> None:
    """Of a dozen contexts some are extended in each step, by a token or by many, once or by forks,
    beside a draw; some leave and others come."""
    dice, rows = random.Random(seed), {}
    known = [Query(text(n, dice.choice([1, 20, 40, 90])), dice.choice(adapters)) for n in range(12)]
    for step in range(steps):
        chosen = dice.sample(known, dice.randrange(1, 9))
        batch = dict.fromkeys(
            each.extended(text(dice.randrange(1 << 30), dice.choice([1, 1, 1, 2, 40])))
            for each in chosen
            for _ in range(dice.choice([1, 1, 3]))
            if len(each.token_ids) < 200
        )
        draws = [SampleRequest(Query(text(step, 5), dice.choice(adapters)), GREEDY)] * (step == 5)
        found = engine.step(*batch, *draws)
        while not found.keys() >= batch.keys():
            found |= engine.step()
        answered = [query for query in batch if query in found]
        rows |= {query: found[query] for query in answered[:4]}
        known = [*dice.sample(known, 6), *answered[:6]]
        known.append(Query(text(100 + step, 30), dice.choice(adapters)))
    engine.genlm_clear_kv_cache()
    engine.assert_cold_rows(rows)


@pytest.fixture
def reasons() -> Iterator[Callable[[], list[str]]]:
    """Why sessions pause, as the log says."""
    with capture_logs() as logs:
        yield lambda: [each["reason"] for each in logs if each["event"] == "vllm.sessions_pause"]


def joined(engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many requests enter vLLM's batch where four contexts are extended."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    usual, entered = InputBatch.add_request, []

    def add_request(self, request):
        entered.append(request)
        return usual(self, request)

    contexts = [text(seed, 12) for seed in range(4)]  # computed in one step
    engine.ask(*map(Query, contexts))
    monkeypatch.setattr(InputBatch, "add_request", add_request)
    engine.ask(*(Query((*ids, 7)) for ids in contexts))
    monkeypatch.undo()
    return len(entered)


def test_an_extended_session_stays_in_the_batch(engine, monkeypatch):
    assert joined(engine, monkeypatch) == 0


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_in_a_small_cache(engine, seed):
    check_random_program(engine, seed)


def test_idle_sessions_that_vllm_preempts_are_right_when_they_are_extended(engine, monkeypatch):
    """Draws that need room take it from the sessions that came after them. So that they must, none
    is released before. Some are extended while they wait for room, some after they came again."""
    from vllm.v1.core.sched.scheduler import Scheduler

    usual, preempted = Scheduler._preempt_request, []

    def preempt(self, request, *given, **options):
        preempted.append(request.request_id)
        return usual(self, request, *given, **options)

    monkeypatch.setattr(Scheduler, "_preempt_request", preempt)
    monkeypatch.setattr(Sessions, "trim", lambda self, tokens_in_flight: [])
    draws = [SampleRequest(Query(text(50 + n, 60)), GREEDY) for n in range(3)]
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
    for draw in draws:
        assert drawn[draw] == engine.draw([draw.query], [draw.params])[0]


def test_random_programs_with_adapters(load_briefly, write_adapter, reasons):
    engine = load_briefly(enable_lora=True, max_loras=2, max_lora_rank=8)
    adapters = [
        Adapter(name, write_adapter(name, seed), seed) for seed, name in ((1, "a"), (2, "b"))
    ]
    for adapter in adapters:
        engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    check_random_program(engine, 9, [None, *adapters], steps=12)
    assert reasons() == []


# --- where they pause -----------------------------------------------------------------------------


def test_they_pause_where_vllm_lacks_what_they_need(load_briefly, monkeypatch, reasons):
    monkeypatch.setattr(running, "RUNNER_NAMES", ("requests", "input_batch.unheard_of"))
    engine = load_briefly()
    monkeypatch.undo()
    assert joined(engine, monkeypatch) == 4
    check_random_program(engine, 3)
    (reason,) = reasons()
    assert "input_batch.unheard_of" in reason


def test_they_pause_where_the_row_of_an_extended_one_is_not_the_cold_one(
    load_briefly, monkeypatch, reasons
):
    def extend(self, request_id, token_ids):
        usual(self, request_id, [token_id + 1 for token_id in token_ids])

    usual = RunningSessions.extend
    monkeypatch.setattr(RunningSessions, "extend", extend)
    engine = load_briefly()
    (reason,) = reasons()
    assert "apart" in reason
    contexts = [text(0, 20), (*text(0, 20), 5), (*text(0, 20), 5, 6)]
    for ids in contexts:
        engine.computes(ids)
