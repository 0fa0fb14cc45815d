"""Concurrent calls of one trie."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

from genlm.core import InvalidInputError, InvalidOptionError, ModelClosedError
from genlm.core.runtime.batcher import Batcher
from genlm.core.trie import AsyncTokenCharacterTrie, ParallelTokenCharacterTrie, TokenCharacterTrie

from ..conftest import PATIENCE, run_python

pytestmark = pytest.mark.any_version


class Watched(TokenCharacterTrie):
    """A kernel that records the size of every batch, and waits on request."""

    def __init__(self, decode, device=None):
        super().__init__(decode, device)
        self.batches = []
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def batch_weight_sum(self, ws, dtype=None):
        self._note("sum", ws)
        return super().batch_weight_sum(ws, dtype)

    def batch_weight_max(self, ws, dtype=None):
        self._note("max", ws)
        return super().batch_weight_max(ws, dtype)

    def _note(self, operation, ws):
        self.batches.append((operation, len(ws)))
        self.entered.set()
        if not self.go_on.wait(PATIENCE):
            raise TimeoutError("the test never let the batch go on")


@pytest.fixture
def watched(vocabulary):
    return Watched(vocabulary)


@pytest.fixture
def trie(watched):
    with_calls = AsyncTokenCharacterTrie(watched)
    yield with_calls
    with_calls.shutdown()


def test_concurrent_calls_are_one_kernel_call_for_each_operation(trie, watched, weights):
    async def all_at_once():
        return await asyncio.gather(*map(trie.weight_sum, weights), *map(trie.weight_max, weights))

    answers = asyncio.run(all_at_once())
    assert sorted(watched.batches) == [("max", 5), ("sum", 5)]
    plain = TokenCharacterTrie(watched.decode)
    assert np.array_equal(answers[:5], plain.batch_weight_sum(weights))
    assert np.array_equal(answers[5:], plain.batch_weight_max(weights))


def test_requests_made_while_the_kernel_works_are_the_next_batch(trie, watched, weights):
    async def ask():
        watched.go_on.clear()
        first = asyncio.ensure_future(trie.weight_sum(weights[0]))
        assert await asyncio.to_thread(watched.entered.wait, PATIENCE)
        others = [asyncio.ensure_future(trie.weight_sum(row)) for row in weights[1:]]
        for _ in range(5):  # passes of the event loop
            await asyncio.sleep(0)
        watched.go_on.set()
        await asyncio.gather(first, *others)

    asyncio.run(ask())
    assert watched.batches == [("sum", 1), ("sum", 4)]


def test_an_error_reaches_only_its_caller(trie, weights):
    class Ended:
        def __array__(self, *args, **kwargs):
            raise StopIteration("which no future takes")

    async def ask():
        calls = [
            trie.weight_sum(weights[0]),
            trie.weight_sum([1.0]),
            trie.weight_sum(Ended()),
            trie.weight_max("x"),
            trie.weight_max(weights[1]),
        ]
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE)

    good, wrong, ended, nonsense, also_good = asyncio.run(ask())
    assert isinstance(wrong, InvalidInputError)
    assert isinstance(ended, TypeError | RuntimeError)
    assert isinstance(ended.__cause__, StopIteration)
    assert isinstance(nonsense, ValueError)
    assert np.array_equal(good, trie.trie.weight_sum(weights[0]))
    assert np.array_equal(also_good, trie.trie.weight_max(weights[1]))


def test_cancelling_a_caller_leaves_the_others_alone(trie, watched, weights):
    async def ask():
        watched.go_on.clear()
        calls = [asyncio.ensure_future(trie.weight_sum(row)) for row in weights]
        assert await asyncio.to_thread(watched.entered.wait, PATIENCE)
        calls[0].cancel()
        watched.go_on.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    cancelled, *others = asyncio.run(ask())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert np.array_equal(others, trie.trie.batch_weight_sum(weights[1:]))


def test_async_trie_works_in_several_event_loops(trie, weights):
    answers = {}

    def run(index):
        answers[index] = [asyncio.run(trie.weight_sum(weights[index])) for _ in range(2)]

    threads = [threading.Thread(target=run, args=[index]) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    expected = trie.trie.batch_weight_sum(weights[:4])
    for again in range(2):
        assert np.array_equal([answers[i][again] for i in range(4)], expected)


def test_async_trie_works_again_after_a_shutdown(trie, weights):
    async def ask():
        trie.start()
        before = await trie.weight_sum(weights[0])
        await trie.cleanup()
        trie.shutdown()
        return before, await trie.weight_sum(weights[0])

    before, after = asyncio.run(ask())
    assert np.array_equal(before, after)


def test_shutdown_fails_waiting_calls(trie, watched, weights):
    async def ask():
        watched.go_on.clear()
        running = asyncio.ensure_future(trie.weight_sum(weights[0]))
        assert await asyncio.to_thread(watched.entered.wait, PATIENCE)
        waiting = asyncio.ensure_future(trie.weight_sum(weights[1]))
        await asyncio.sleep(0)
        ending = asyncio.ensure_future(trie.cleanup())
        with pytest.raises(ModelClosedError):
            await waiting
        watched.go_on.set()
        await ending
        return await running

    assert np.array_equal(asyncio.run(ask()), trie.trie.weight_sum(weights[0]))


def test_unreferenced_async_trie_ends_its_thread(vocabulary, weights):
    trie = AsyncTokenCharacterTrie.from_vocab(vocabulary, backend="sequential")
    before = {*threading.enumerate()}
    trie.start()
    (worker,) = {*threading.enumerate()} - before
    asyncio.run(trie.weight_sum(weights[0]))
    held = weakref.ref(trie.trie)
    del trie
    gc.collect()
    worker.join(PATIENCE)
    assert not worker.is_alive()
    gc.collect()
    assert held() is None


def test_a_worker_that_was_shut_down_leaves_nothing_behind(trie):
    gc.collect()
    before = sum(isinstance(one, Batcher) for one in gc.get_objects())
    trie.start()
    trie.shutdown()
    gc.collect()
    assert sum(isinstance(one, Batcher) for one in gc.get_objects()) <= before


def test_forked_child_gets_its_own_worker_even_if_the_lock_was_held():
    """And the interpreter ends quietly with a trie in use."""
    result = run_python("""
        import asyncio, os, signal, threading, warnings
        from genlm.core.trie import AsyncTokenCharacterTrie
        # Since Python 3.12, forking a process with threads warns, and this test does so on purpose.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        trie = AsyncTokenCharacterTrie.from_vocab([b"a", b"ab"], backend="sequential")
        def works():
            return asyncio.run(trie.weight_sum([0.25, 0.75]))[trie.trie.root] == 1.0
        assert works()
        held, forked = threading.Event(), threading.Event()
        def hold():
            with trie._lock:
                held.set()
                forked.wait()
        threading.Thread(target=hold).start()
        held.wait()
        if child := os.fork():
            forked.set()
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        else:
            signal.alarm(60)
            assert works()
            trie.shutdown()
            assert works()
    """)
    assert (result.stdout, result.stderr) == ("0\n", "")


def test_from_vocab_chooses_the_trie_by_its_backend(vocabulary):
    sequential = AsyncTokenCharacterTrie.from_vocab(vocabulary, backend="sequential")
    assert type(sequential.trie) is TokenCharacterTrie
    parallel = AsyncTokenCharacterTrie.from_vocab(vocabulary, device="cpu")
    assert type(parallel.trie) is ParallelTokenCharacterTrie
    with pytest.raises(InvalidOptionError, match="'parallel' or 'sequential'"):
        AsyncTokenCharacterTrie.from_vocab(vocabulary, backend="serial")


def test_async_trie_over_another_object_is_rejected():
    with pytest.raises(InvalidInputError, match=r"call from_vocab\(vocab\); got \[b'a'\]"):
        AsyncTokenCharacterTrie([b"a"])


@pytest.mark.parametrize(
    "made", [copy.copy, copy.deepcopy, lambda trie: pickle.loads(pickle.dumps(trie))]
)
def test_copy_outlives_its_original(made):
    trie = AsyncTokenCharacterTrie.from_vocab([b"a", b"ab"])
    trie.start()
    again = made(trie)
    del trie
    assert asyncio.run(again.weight_sum([0.25, 0.75]))[again.trie.root] == 1.0
    again.shutdown()
