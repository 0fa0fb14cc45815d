from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from genlm.core import Context, Query
from genlm.core.cache import OutputCache

from .conftest import busy


def row(value: float, width: int = 4) -> torch.Tensor:
    return torch.full((width,), value)


def put(cache: OutputCache, key: str, value: float) -> None:
    cache.put([(key, row(float(value)))], cache.generation)


def test_the_least_recently_used_row_goes_first():
    cache = OutputCache(2, False)
    put(cache, "a", 1)
    put(cache, "b", 2)
    put(cache, "b", 3)  # the cache is full, but nothing is evicted
    assert cache.nbytes == 2 * 16
    assert torch.equal(cache.peek("b"), row(3.0))
    assert torch.equal(cache.peek("a"), row(1.0))
    put(cache, "c", 4)
    assert ("a" in cache, "b" in cache, "c" in cache, len(cache)) == (True, False, True, 2)
    cache.clear()
    assert ("a" in cache, len(cache)) == (False, 0)


def test_bytes_are_bounded_and_counted():
    cache = OutputCache(maxsize=None, max_bytes=3 * 16)
    for i in range(5):
        put(cache, str(i), i)
    assert (len(cache), cache.nbytes) == (3, 48)
    # A row that is too large does not keep others out.
    cache.put([("a", row(1.0)), ("huge", row(0.0, 100)), ("b", row(2.0))], cache.generation)
    assert ("a" in cache, "huge" in cache, "b" in cache) == (True, False, True)
    cache.clear()
    assert (len(cache), cache.nbytes) == (0, 0)


@pytest.mark.filterwarnings("error::RuntimeWarning")  # NumPy warns if its integers overflow
@pytest.mark.parametrize(
    "limits",
    [{"maxsize": 3}, {"maxsize": None, "max_bytes": 48}, {"max_bytes": np.uint8(48)}],
)
def test_last_of_many_rows_stored_at_once_are_kept(limits):
    cache = OutputCache(**limits)
    put(cache, "first", -1)
    cache.put([(str(i), row(float(i))) for i in range(9)], cache.generation)
    assert [float(cache.peek(str(i))[0]) for i in (6, 7, 8)] == [6, 7, 8]
    assert (len(cache), cache.nbytes) == (3, 48)


def test_ids_and_objects_of_long_contexts_count_as_bytes():
    each = 16 + 1100 + 50 * 1000
    cache = OutputCache(maxsize=None, max_bytes=2 * each)
    for i in range(3):
        cache.put([(Query((i,) * 1000), row(float(i)))], cache.generation)
    assert (len(cache), cache.nbytes) == (2, 2 * each)


def test_memory_of_short_rows_is_within_the_counted_bytes():
    """In a process of its own, whose memory no other test has left free."""
    program = """
import gc, os
import torch
from genlm.core.cache import OutputCache
from genlm.core.types import Query

def resident():
    gc.collect()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def fill(cache, count, width):
    for at in range(count):
        ids = tuple(int(one) for one in f"{1000 * at:08}")
        cache.put([(Query(ids), torch.zeros(width))], cache.generation)

fill(OutputCache(None, max_bytes=None), 100, 258)
cache, before = OutputCache(None, max_bytes=None), resident()
fill(cache, 20_000, 258)
print((resident() - before) / cache.nbytes)
"""
    if not Path("/proc/self/statm").exists():
        pytest.skip("/proc/self/statm, which has the memory of a process on Linux, is missing")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0.6 < float(done.stdout) < 1.1, done.stdout


def test_memory_of_long_contexts_is_within_the_counted_bytes():
    """An id of a vocabulary is an object, and each list of ids may have its own."""
    cache = OutputCache(maxsize=None, max_bytes=None)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for at in range(10):
        query = Query(Context(tuple(np.arange(300 + at, 20_300 + at).tolist()), 1 << 20))
        assert len(query.token_ids) == 20_000  # as an engine reads them
        cache.put([(query, row(float(at)))], cache.generation)
        del query
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.8 * cache.nbytes < after - before <= cache.nbytes


class Interrupted:
    """All are equal. One runs a signal handler, so to speak, when it is hashed or compared for the
    ``at``-th time."""

    def __init__(self) -> None:
        self.call(lambda: None, at=0)

    def call(self, handler: Callable[[], None], at: int) -> None:
        self._handler, self._left = handler, at

    def __hash__(self) -> int:
        self._look()
        return 0

    def __eq__(self, other: object) -> bool:
        self._look()
        return isinstance(other, Interrupted)

    def _look(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._handler()


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("use", ["peek", "drop"])
def test_a_signal_handler_may_clear_the_cache_while_it_is_used(at, use):
    cache = OutputCache()
    kept = Interrupted()
    put(cache, kept, 1)
    key = kept if use == "drop" else Interrupted()
    key.call(cache.clear, at)
    if use == "peek":
        cache.peek(key)
    else:
        cache.drop(lambda kept: True)
    assert cache.nbytes == 16 * len(cache)
    cache.clear()
    put(cache, Interrupted(), 3)
    assert torch.equal(cache.peek(Interrupted()), row(3))


def test_an_uncached_request_bypasses_the_cache_both_ways(mock, gate):
    lm = mock()
    lm.next_token_logprobs_sync([1])
    lm.next_token_logprobs_uncached([1])
    lm.next_token_logprobs_uncached([2])
    lm.next_token_logprobs_sync([2])
    assert len(gate.batches) == 4
    lm.clear_cache()
    lm.next_token_logprobs_sync([2])
    assert len(gate.batches) == 5


async def test_rows_of_a_batch_during_clearing_are_not_cached(mock, gate):
    lm = mock()
    asked = await busy(lm, gate, [1])
    lm.clear_cache()
    gate.open()
    await asked
    await lm.next_token_logprobs([1])
    assert len(gate.batches) == 2


def test_cache_opts_reach_the_cache(mock, gate):
    lm = mock(cache_opts={"maxsize": 1, "move_to_cpu": True})
    for context in ([1], [1], [2], [1]):
        lm.next_token_logprobs_sync(context)
    assert len(gate.batches) == 3
