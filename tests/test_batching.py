"""How requests become batches, when they share a place, and how answers come back."""

from __future__ import annotations

import asyncio
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from genlm.conformance.driver import started, submitted
from genlm.core import AsyncLM, QueriesResetError
from genlm.core.mock import ByteTokenizer, MockEngine

from .conftest import busy, gathered

pytestmark = pytest.mark.any_version


async def test_coroutines_that_ask_a_few_passes_apart_share_a_batch(mock, gate):
    lm, asked = mock(), []
    for i in range(5):  # each pass of the loop adds a request, so the batch stays open
        asked.append(asyncio.ensure_future(lm.next_token_logprobs([i, i])))
        await asyncio.sleep(0)
    lm.next_token_logprobs_sync([9])  # requests that had already left would be there before it
    await asyncio.gather(*asked)
    assert [len(batch) for batch in gate.batches] == [1, 5]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks need Python 3.12")
async def test_tasks_that_begin_at_once_share_a_batch(mock, gate):
    lm = mock()

    async def particle(first):
        context = lm.context([first])
        for _ in range(3):
            context = context.extend(int((await lm.next_token_logprobs(context)).argmax()))

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)
    await asyncio.gather(*map(particle, range(5)))
    assert [len(batch) for batch in gate.batches] == [5] * 3


@pytest.mark.parametrize(("options", "passes"), [({"batch_size": 8}, 9), ({}, 200)])
async def test_loop_with_new_requests_in_every_pass_still_gets_batches(mock, gate, options, passes):
    lm, asked = mock(**options), []
    for i in range(passes):
        asked.append(asyncio.ensure_future(lm.next_token_logprobs([i])))
        await asyncio.sleep(0)
    gate.wait_entered()  # without another pass
    await asyncio.gather(*asked)


@pytest.mark.parametrize("options", [{}, {"continuous": True, "steps": 1}])
async def test_requests_queued_during_a_batch_form_the_next_one(mock, gate, options):
    lm = mock(**options)
    first = await busy(lm, gate, [0])
    others = await started(*(lm.next_token_logprobs([i]) for i in range(1, 10)))
    gate.open()
    await asyncio.gather(first, *others)
    assert [len(batch) for batch in gate.batches] == [1, 9]


async def test_new_requests_join_a_continuous_engine_between_its_steps(mock, gate):
    lm = mock(continuous=True, steps=3)
    first = await busy(lm, gate, [0])
    (second,) = await started(lm.next_token_logprobs([1]))
    gate.open()
    await asyncio.gather(first, second)
    assert gate.batches == [[(0,)], [(0,), (1,)], [(0,), (1,)], [(1,)]]


async def test_request_equal_to_a_running_one_shares_its_row(mock, gate):
    lm = mock()
    first = await busy(lm, gate, [1])
    (second,) = await started(lm.next_token_logprobs([1]))
    gate.open()
    assert torch.equal(await first, await second)
    assert gate.batches == [[(1,)]]
    assert (lm.stats.requests, lm.stats.rows, lm.stats.cache_hits) == (2, 1, 1)


@pytest.mark.parametrize("continuous", [False, True])
def test_batch_size_limits_the_requests_in_flight(mock, gate, continuous):
    lm = mock(batch_size=4, continuous=continuous)
    lm.batch_next_token_logprobs_sync([[i] for i in range(10)])
    assert max(len(batch) for batch in gate.batches) == 4
    if not continuous:
        assert [len(batch) for batch in gate.batches] == [4, 4, 2]


def test_timeout_holds_a_batch_open_until_it_is_full(mock, gate):
    lm = mock(batch_size=2, timeout=3600.0)
    # Each thread makes one request, and only both together fill the batch.
    with ThreadPoolExecutor(2) as pool:
        assert len(list(pool.map(lm.next_token_logprobs_sync, [[1], [2]]))) == 2
    assert [sorted(batch) for batch in gate.batches] == [[(1,), (2,)]]


class CountingLoop(asyncio.SelectorEventLoop):
    calls = wakeups = 0

    def call_soon(self, callback, *args, context=None):
        self.calls += 1
        return super().call_soon(callback, *args, context=context)

    def call_soon_threadsafe(self, callback, *args, context=None):
        self.wakeups += 1
        return super().call_soon_threadsafe(callback, *args, context=context)

    def call_at(self, *args, **kwargs):
        raise AssertionError("a timer was set")


def test_single_request_does_not_wait(mock, gate):
    """Nothing else happens on the loop, and no timer is set: the request alone must start the
    engine."""
    lm = mock()
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(lm.next_token_logprobs([1, 2]))
    assert gate.batches == [[(1, 2)]]


def test_a_finished_batch_wakes_each_event_loop_once(mock):
    lm = mock()
    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(lm.batch_next_token_logprobs([[i] for i in range(50)]))
        assert runner.get_loop().wakeups == 1


def test_loop_closed_before_its_batch_is_released(mock):
    lm = mock()
    loop = asyncio.new_event_loop()
    # The handler would report that the task never ended.
    loop.set_exception_handler(lambda *_: None)
    task = loop.create_task(lm.next_token_logprobs([1]))
    loop.call_soon(loop.stop)  # in the pass that makes the request
    loop.run_forever()
    loop.close()
    gone = weakref.ref(loop)
    del loop, task
    asyncio.run(lm.next_token_logprobs([2]))
    lm.next_token_logprobs_sync([3])  # by now, the engine thread has delivered the others
    gc.collect()
    assert gone() is None


def test_loop_with_withdrawn_requests_schedules_nothing(mock):
    lm = mock()

    async def calls_of_some_passes():
        loop = asyncio.get_running_loop()
        before = loop.calls
        await submitted()
        return loop.calls - before

    async def ask():
        idle = await calls_of_some_passes()
        asked = asyncio.ensure_future(lm.next_token_logprobs([1]))
        await asyncio.sleep(0)
        lm.reset_async_queries()
        with pytest.raises(QueriesResetError):
            await asked
        assert await calls_of_some_passes() == idle

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(ask())


def test_empty_batch_gives_an_empty_result(mock):
    class Elsewhere(MockEngine):
        device = "meta"

    lm = mock()
    assert asyncio.run(lm.batch_sample([], 3, [])) == []
    torch.set_default_dtype(torch.float64)
    try:
        rows = lm.batch_next_token_logprobs_sync([])
    finally:
        torch.set_default_dtype(torch.float32)
    assert (rows.shape, rows.dtype) == ((0, 258), torch.float32)
    with AsyncLM(lambda: Elsewhere(ByteTokenizer()), backend="mock") as lm:
        assert lm.batch_next_token_logprobs_sync([]).device.type == "meta"


def test_counters_of_stats_add_up(mock):
    lm = mock()
    for tokens in (5, 10):
        gathered(*(lm.next_token_logprobs([i % tokens]) for i in range(20)))
    stats = lm.stats
    assert (stats.requests, stats.rows, stats.batches, stats.largest_batch) == (40, 10, 2, 5)
    assert stats.requests == stats.rows + stats.cache_hits + stats.dedup_hits
    assert stats.engine_seconds > 0
