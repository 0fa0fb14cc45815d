"""The steps of a continuous engine: admission, drops, the wake-up, fairness.

The engine here blocks in every step until the test gives the step's results, or the core wakes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
import structlog
import torch

from genlm.core import (
    Answer,
    AsyncLM,
    EngineDeadError,
    EngineError,
    ModelClosedError,
    QueriesResetError,
    hookimpl,
    together,
)
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine

from .conftest import PATIENCE, gathered
from .doubles import Elsewhere, result_of, row_of

pytestmark = pytest.mark.any_version


@contextlib.contextmanager
def opened(engine):
    """A model over the engine, and threads that may make requests."""
    with model_of(engine) as lm, ThreadPoolExecutor() as threads:
        yield lm, threads.submit


def model_of(engine):
    return AsyncLM(lambda: engine, backend="elsewhere")


def later(asked):
    return asyncio.ensure_future(asked)


def kinds(requests):
    return sorted(type(request).__name__ for request in requests)


def test_a_request_equal_to_one_in_flight_shares_its_answer():
    engine = Elsewhere()
    with opened(engine) as (lm, submit):
        first = submit(lm.next_token_logprobs_sync, [1])
        engine.next_step()
        second = submit(lm.next_token_logprobs_sync, [1])
        assert engine.next_step() == ([], [])  # woken
        engine.finish()
        assert torch.equal(first.result(PATIENCE), second.result(PATIENCE))
        assert (lm.stats.requests, lm.stats.rows, lm.stats.dedup_hits) == (2, 1, 1)


def test_no_request_joins_a_cold_row():
    engine = Elsewhere()
    with opened(engine) as (lm, submit):
        cold = submit(lm.next_token_logprobs_uncached, [1])
        engine.next_step()
        row = submit(lm.next_token_logprobs_sync, [2])
        assert engine.next_step() == ([], [])  # woken
        engine.finish()
        cold.result(PATIENCE)
        assert [query.token_ids for query in engine.next_step()[0]] == [(2,)]
        engine.finish()
        row.result(PATIENCE)


async def test_request_without_callers_is_dropped_and_can_be_repeated():
    engine = Elsewhere()
    with model_of(engine) as lm:
        draw, row = later(lm.sample([1], 100, [])), later(lm.next_token_logprobs([2]))
        kept, equal = (later(lm.next_token_logprobs([3])) for _ in range(2))
        assert kinds(await engine.step_with(0)) == ["Query", "Query", "SampleRequest"]
        for gone in (draw, row, equal):
            gone.cancel()
        dropped = await engine.step_with(1)
        while len(dropped) < 2:
            dropped += await engine.step_with(1)
        assert kinds(dropped) == ["Query", "SampleRequest"]
        again = later(lm.next_token_logprobs([2]))
        assert [query.token_ids for query in await engine.step_with(0)] == [(2,)]
        engine.finish()
        assert torch.equal(await again, row_of(2))
        assert torch.equal(await kept, row_of(3))
        assert lm.stats.cancelled == 2


async def test_requests_in_flight_of_a_call_that_is_reset_are_dropped():
    engine = Elsewhere()
    with AsyncLM(lambda: engine, backend="elsewhere", batch_size=2) as lm:
        call = later(lm.batch_next_token_logprobs([[1], [2], [3], [4]]))
        await engine.step_with(0)
        lm.reset_async_queries()
        with pytest.raises(QueriesResetError):
            await call
        assert [query.token_ids for query in await engine.step_with(1)] == [(1,), (2,)]
        row = later(lm.next_token_logprobs([5]))
        assert [query.token_ids for query in await engine.step_with(0)] == [(5,)]
        engine.finish()
        assert torch.equal(await row, row_of(5))


async def test_no_further_request_of_a_call_that_has_failed_is_admitted():
    class Fails(Elsewhere):
        @hookimpl
        def genlm_step(self, queries, samples, dropped):
            failing = [query for query in queries if query.token_ids == (1,)]
            if not failing:
                return super().genlm_step(queries, samples, dropped)
            self.in_flight.update(dict.fromkeys(query for query in queries if query not in failing))
            self.steps.put((queries, []))
            return [Answer(query, EngineError("fails")) for query in failing]

    engine = Fails()
    with AsyncLM(lambda: engine, backend="elsewhere", batch_size=2) as lm:
        call = later(lm.batch_next_token_logprobs([[1], [2], [3], [4], [6]]))
        assert len(await engine.step_with(0)) == 2
        with pytest.raises(EngineError, match="fails"):
            await call
        row = later(lm.next_token_logprobs([5]))
        assert [query.token_ids for query in await engine.step_with(0)] == [(5,)]
        engine.finish()
        assert torch.equal(await row, row_of(5))


async def test_answer_for_a_request_dropped_in_the_same_step_is_ignored():
    class Finishes(Elsewhere):
        @hookimpl
        def genlm_step(self, queries, samples, dropped):
            answers = super().genlm_step(queries, samples, dropped)
            return [*answers, *(Answer(request, result_of(request)) for request in dropped)]

    engine = Finishes()
    with model_of(engine) as lm:
        gone, kept = (later(lm.next_token_logprobs([i])) for i in (1, 2))
        await engine.step_with(0)
        gone.cancel()
        await engine.step_with(1)
        engine.finish()
        assert torch.equal(await kept, row_of(2))


async def test_an_engine_that_does_not_name_dropped_runs_requests_to_their_end():
    class Keeps(Elsewhere):
        @hookimpl
        def genlm_step(self, queries, samples):
            return super().genlm_step(queries, samples, [])

    engine = Keeps()
    with model_of(engine) as lm:
        gone = later(lm.sample([1], 3, []))
        await engine.step_with(0)
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
        row = later(lm.next_token_logprobs([2]))
        await engine.step_with(0)
        assert kinds(engine.in_flight) == ["Query", "SampleRequest"]
        engine.finish()
        assert torch.equal(await row, row_of(2))


async def test_an_exception_of_a_function_ends_its_batch_call_and_drops_its_other_requests():
    engine = Elsewhere()
    inverse = together(lambda rows, numbers: [1 / number for number in numbers])
    with model_of(engine) as lm:
        cached = later(lm.next_token_logprobs([1]))
        await engine.step_with(0)
        engine.finish()
        await cached
        asked = later(lm.batch_next_token_logprobs([[1], [2]], then=map(inverse, (0, 1))))
        await engine.step_with(0)
        # Wakes the step, which then gives the row of [1].
        other = later(lm.next_token_logprobs([3]))
        assert [query.token_ids for query in await engine.step_with(1)] == [(2,)]
        engine.finish()
        assert torch.equal(await other, row_of(3))
        with pytest.raises(ZeroDivisionError):
            await asked


def test_a_task_wakes_the_engine_and_waits_until_nothing_is_in_flight():
    engine = Elsewhere()
    with opened(engine) as (lm, submit):
        row = submit(lm.next_token_logprobs_sync, [1])
        engine.next_step()
        cleared = submit(lm.clear_kv_cache)
        assert engine.next_step() == ([], [])  # woken
        lm.reset_async_queries()  # this drops no task
        asked = submit(lm.next_token_logprobs_sync, [2])
        assert engine.next_step() == ([], [])  # woken, but later requests wait
        assert engine.cleared == 0
        engine.finish()
        row.result(PATIENCE), cleared.result(PATIENCE)
        assert engine.cleared == 1
        assert [query.token_ids for query in engine.next_step()[0]] == [(2,)]
        engine.finish()
        asked.result(PATIENCE)


def test_closing_wakes_the_engine():
    engine = Elsewhere()
    with opened(engine) as (lm, submit):
        asked = submit(lm.next_token_logprobs_sync, [1])
        engine.next_step()
        submit(lm.close).result(PATIENCE)
        with pytest.raises(ModelClosedError):
            asked.result(PATIENCE)


def test_raising_wake_is_logged_once_and_fails_no_request():
    class Broken(Elsewhere):
        @hookimpl
        def genlm_wake(self):
            super().genlm_wake()
            raise OSError("the pipe is broken")

    engine = Broken()
    with structlog.testing.capture_logs() as logs, opened(engine) as (lm, submit):
        asked = []
        for token in (1, 2, 3):
            asked.append(submit(lm.next_token_logprobs_sync, [token]))
            engine.next_step()
        engine.finish()
        for each in asked:
            each.result(PATIENCE)
    assert [each["event"] for each in logs].count("engine.wake_failed") == 1


# --- answers --------------------------------------------------------------------------------------


def test_a_wrong_result_is_an_error_of_its_own_request():
    class Wrong(ContinuousMockEngine):
        def row(self, query):
            row = super().row(query)
            return row[:10] if query.token_ids == (13,) else row

        def _draws(self, queries, params):
            drawn = super()._draws(queries, params)
            return [
                [-1] if q.token_ids == (13,) else d for q, d in zip(queries, drawn, strict=True)
            ]

        def _score(self, query, continuation):
            return torch.zeros(7)

    with opened(Wrong(ByteTokenizer())) as (lm, _):
        row, drawn, wrong_row, wrong_draw, wrong_score = gathered(
            lm.next_token_logprobs([1]),
            lm.sample([1], 2, []),
            lm.next_token_logprobs([13]),
            lm.sample([13], 2, []),
            lm.sequence_logprobs([1], [2, 3]),
        )
    assert "genlm_step returned shape (10,)" in str(wrong_row)
    assert "genlm_step returned the token id -1" in str(wrong_draw)
    assert "genlm_step returned shape (7,)" in str(wrong_score)
    assert torch.equal(row, row_of(1))
    assert len(drawn) == 2


@pytest.mark.parametrize(
    "answers",
    [
        lambda queries: None,
        lambda queries: torch.zeros(len(queries), 258),
        lambda queries: [Answer(query.token_ids, torch.zeros(258)) for query in queries],
    ],
)
def test_result_of_a_step_that_is_no_answer_ends_the_engine(answers):
    class Wrong(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            return answers(queries)

    wrong = r"genlm_step returned what is no Answer\(request, result\)"
    with opened(Wrong(ByteTokenizer())) as (lm, _), pytest.raises(EngineDeadError, match=wrong):
        lm.next_token_logprobs_sync([1])


def test_step_may_return_a_single_answer_without_a_list():
    class One(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            return Answer(queries[0], row_of(*queries[0].token_ids))

    with opened(One(ByteTokenizer())) as (lm, _):
        assert torch.equal(lm.next_token_logprobs_sync([1]), row_of(1))


def test_engine_naming_only_queries_draws_while_nothing_is_in_flight():
    asked = []

    class RowsOnly(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            asked.append(("step", len(queries)))
            return self.advance(queries)

        @hookimpl
        def genlm_sample(self, queries, params):
            assert not self._in_flight
            asked.append(("sample", len(queries)))
            return super().genlm_sample(queries, params)

    with opened(RowsOnly(ByteTokenizer())) as (lm, _):
        gathered(lm.next_token_logprobs([1]), lm.sample([2], 3, []), lm.next_token_logprobs([3]))
    assert asked == [("step", 2), ("step", 0), ("sample", 1)]


@pytest.mark.parametrize(
    "other",
    [
        lambda lm: lm.sample([2], 3, []),
        lambda lm: asyncio.to_thread(lm.next_token_logprobs_uncached, [2]),
        lambda lm: asyncio.to_thread(lm.clear_kv_cache),
    ],
)
async def test_the_engine_drops_requests_before_anything_that_cannot_join_them(other):
    class Rows(Elsewhere):
        @hookimpl
        def genlm_step(self, queries, dropped):
            return super().genlm_step(queries, [], dropped)

        @hookimpl
        def genlm_sample(self, queries, params):
            assert not self.in_flight
            return [[1] * how.max_tokens for how in params]

    engine = Rows()
    with model_of(engine) as lm:
        gone = later(lm.next_token_logprobs([1]))
        await engine.step_with(0)
        asked = later(other(lm))
        await asyncio.to_thread(engine.next_step)  # the step was woken, so the request has arrived
        gone.cancel()
        new_requests, dropped = await asyncio.to_thread(engine.next_step)
        assert (new_requests, len(dropped)) == ([], 1)
        assert not engine.in_flight
        engine.finish()  # ends that step
        engine.finish()  # ends the step of the cold row
        await asyncio.wait_for(asked, PATIENCE)
        row = later(lm.next_token_logprobs([3]))
        await engine.step_with(0)
        engine.finish()
        assert torch.equal(await asyncio.wait_for(row, PATIENCE), row_of(3))


def test_a_step_that_finished_nothing_is_not_a_batch(mock):
    lm = mock(continuous=True, steps=5)
    lm.next_token_logprobs_sync([1])
    assert (lm.stats.batches, lm.stats.rows) == (1, 1)


# --- failures -------------------------------------------------------------------------------------


async def test_after_a_failure_requests_are_admitted_one_by_one_and_new_requests_wait():
    engine = Elsewhere()
    with model_of(engine) as lm:
        draws = [later(lm.sample([i], 3, [])) for i in range(3)]
        await engine.step_with(0)
        engine.fail(RuntimeError("out of memory"))
        (first,) = await engine.step_with(0)
        new_request = later(lm.next_token_logprobs([7]))
        draws[1].cancel()  # cancelled while it waits for its turn
        await asyncio.to_thread(engine.next_step)
        engine.fail(RuntimeError("this is the one"))
        (third,) = await engine.step_with(0)
        engine.finish()
        assert kinds(await engine.step_with(0)) == ["Query"]
        engine.finish()
        await new_request
        assert [r.query.token_ids for r in (first, third)] == [(0,), (2,)]
        failed, gone, drawn = await asyncio.gather(*draws, return_exceptions=True)
    assert isinstance(failed, EngineError)
    assert "this is the one" in str(failed)
    assert isinstance(gone, asyncio.CancelledError)
    assert drawn == [1] * 3


# --- fairness -------------------------------------------------------------------------------------


@pytest.mark.parametrize("continuous", [False, True])
def test_kinds_of_requests_take_turns(mock, gate, continuous):
    """A hundred rows wait. A cold row that is requested after them gets its turn after one batch or
    two."""
    lm = mock(batch_size=10, **({"continuous": True, "steps": 1} if continuous else {}))
    gate.shut()
    with ThreadPoolExecutor() as threads:
        contexts = [[1, i] for i in range(100)]
        rows = threads.submit(lm.batch_next_token_logprobs_sync, contexts)
        gate.wait_entered()
        cold = threads.submit(lm.next_token_logprobs_uncached, [9])
        while lm.stats.requests < 101:
            pass
        gate.open()
        cold.result(PATIENCE), rows.result(PATIENCE)
    assert [(9,)] in gate.batches[1:3]
    assert sum(map(len, gate.batches)) == 101
