from __future__ import annotations

import asyncio
import itertools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from attrs import asdict, evolve

from genlm.core import Stats
from genlm.core.runtime.timeline import STAGES, Timeline

from .conftest import PATIENCE


def test_signal_handler_may_read_stages_while_they_are_updated():
    clock = map(float, itertools.count(1)).__next__  # each reading is one second later
    timeline = Timeline(clock=clock)

    class Interrupted(float):
        """Runs a signal handler, so to speak, in the middle of the addition."""

        def __rsub__(self, ended):
            timeline.add("queue", clock())
            return timeline.spent()["queue"]

    timeline.add("engine", clock())
    timeline.add("engine", Interrupted(clock()))
    assert timeline.spent() == {**dict.fromkeys(STAGES, 0.0), "queue": 1.0, "engine": 2.0}


def test_the_first_request_has_every_stage(mock):
    lm = mock()
    lm.next_token_logprobs_sync([1])
    lm.clear_kv_cache()  # returns once the previous batch has been delivered
    assert all(
        seconds > 0 for name, seconds in asdict(lm.stats).items() if name.endswith("_seconds")
    )


def test_engine_seconds_cover_what_the_engine_does(mock):
    inside = []

    def on_batch(queries):
        began = time.perf_counter()
        sum(range(10_000))
        inside.append(time.perf_counter() - began)

    lm = mock(on_batch=on_batch)
    asyncio.run(lm.batch_next_token_logprobs([[1], [2]]))
    lm.next_token_logprobs_sync([3])
    assert lm.stats.batches == 2
    assert lm.stats.engine_seconds >= sum(inside)


def test_queue_seconds_cover_the_wait_for_the_engine(mock, gate):
    lm = mock()
    gate.shut()
    with ThreadPoolExecutor() as threads:
        first = threads.submit(lm.next_token_logprobs_sync, [1])
        gate.wait_entered()
        began = lm.stats.queue_seconds
        second = threads.submit(lm.next_token_logprobs_sync, [2])
        # Requests are released to the engine thread and counted in one step.
        while lm.stats.requests < 2:
            pass
        queued = time.perf_counter()
        waited = time.perf_counter() - queued
        gate.open()
        first.result(PATIENCE), second.result(PATIENCE)
    assert lm.stats.queue_seconds - began >= waited


def test_difference_of_stats_is_the_work_between_them(mock):
    lm = mock()
    lm.batch_next_token_logprobs_sync([[1], [2], [3]])
    before = lm.stats
    lm.next_token_logprobs_sync([4])
    lm.next_token_logprobs_sync([4])
    done = lm.stats - before
    assert (done.requests, done.rows, done.batches, done.cache_hits) == (2, 1, 1, 1)
    assert done.engine_seconds == lm.stats.engine_seconds - before.engine_seconds
    assert done.largest_batch == 3  # the maximum of the whole time
    assert json.loads(json.dumps(done.as_dict()))["rows"] == 1
    assert Stats(**done.as_dict()) == done
    with pytest.raises(TypeError):
        lm.stats - 1


def test_a_hit_costs_the_engine_nothing(mock):
    lm = mock()
    lm.next_token_logprobs_sync([1])
    lm.clear_kv_cache()
    before = lm.stats
    lm.next_token_logprobs_sync([1])
    assert lm.stats == evolve(before, requests=2, cache_hits=1)
