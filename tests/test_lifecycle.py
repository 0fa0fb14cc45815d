"""The beginning and the end: load, close, collection, exit, fork."""

from __future__ import annotations

import asyncio
import copy
import functools
import gc
import itertools
import os
import pickle
import signal
import threading
import weakref
from pathlib import Path

import pytest

from genlm.core import (
    AsyncLM,
    EngineDeadError,
    MockAsyncLM,
    ModelClosedError,
    QueriesResetError,
    UnsupportedError,
    hookimpl,
)
from genlm.core.collector import Collector
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.runtime import batcher as module
from genlm.core.runtime.batcher import Batcher, Executor

from .conftest import PATIENCE, busy, gathered, run_python
from .lines import before_line, in_time

pytestmark = pytest.mark.any_version

#: The source files of the core.
CORE = str(Path(module.__file__).parents[1])


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("genlm-")]


def test_every_hook_runs_on_one_thread_that_is_not_the_callers():
    threads: list[int] = []

    def note(*_):
        threads.append(threading.get_ident())

    class Recording(MockEngine):
        def __init__(self):
            super().__init__(ByteTokenizer(), on_batch=note)
            note()

        genlm_cache_prefix = genlm_clear_kv_cache = genlm_close = hookimpl(note)

    with AsyncLM(Recording, backend="recording") as lm:
        lm.next_token_logprobs_sync([1])
        asyncio.run(lm.next_token_logprobs([2]))
        lm.cache_kv([1])
        lm.clear_kv_cache()
    assert len(threads) == 6
    assert len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


def test_a_load_that_fails_tells_its_caller_and_leaves_nothing():
    made: list[weakref.ref[MockEngine]] = []

    def load():
        engine = MockEngine(ByteTokenizer())
        made.append(weakref.ref(engine))
        raise OSError("no memory for the rest")

    with pytest.raises(OSError, match="no memory for the rest"):
        AsyncLM(load, backend="broken")
    for thread in engine_threads():
        if thread.name == "genlm-broken":
            thread.join(PATIENCE)
            assert not thread.is_alive()
    gc.collect()
    assert made[0]() is None


@pytest.fixture
def default_collector(monkeypatch):
    """The collector with Python 3.11's settings, whatever models other tests have left open. Its
    settings are restored at the end."""
    monkeypatch.setattr(module, "COLLECTOR", Collector())
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield (700, 10, 10)
    gc.set_threshold(*before)


def test_garbage_is_searched_rarely_while_a_model_loads(default_collector):
    seen = []

    def load():
        seen.append(gc.get_threshold())
        MockAsyncLM().close()  # another model
        seen.append(gc.get_threshold())
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        AsyncLM(load, backend="broken")
    assert gc.get_threshold() == default_collector
    assert seen[0] == seen[1] > default_collector


def test_a_step_of_many_is_not_searched_for_garbage(default_collector):
    """The collector would move the step's temporary objects to the older generation."""
    searched = []
    with MockAsyncLM() as other, MockAsyncLM() as lm:
        other.close()  # this does not end anything that the other model needs
        gc.callbacks.append(lambda phase, info: searched.append(info["generation"]))
        try:
            for n in range(5):
                contexts = [lm.context([n, at % 256, at // 256]) for at in range(1000)]
                gathered(*map(lm.next_token_logprobs, contexts))
        finally:
            gc.callbacks.pop()
    assert not searched
    assert gc.get_threshold() == default_collector


@pytest.mark.parametrize("given", [(0, 10, 10), (200_000, 10, 10)])
def test_how_a_program_has_set_the_collector_is_kept(given, default_collector):
    gc.set_threshold(*given)
    with MockAsyncLM():
        assert gc.get_threshold() == given
    assert gc.get_threshold() == given
    gc.set_threshold(*default_collector)
    with MockAsyncLM():
        gc.set_threshold(*given)
    assert gc.get_threshold() == given


async def test_context_managers_close_the_model():
    with MockAsyncLM() as lm:
        lm.next_token_logprobs_sync([1])
        lm.cleanup()  # the former name of close()
        lm.close()
    with pytest.raises(ModelClosedError):
        lm.next_token_logprobs_sync([1])  # raises, although the row is cached
    with pytest.raises(ModelClosedError, match="the model is closed"), lm:
        pass
    async with MockAsyncLM() as lm:
        await lm.next_token_logprobs([1])
    with pytest.raises(ModelClosedError, match="the model is closed"):
        async with lm:
            pass


def test_a_collected_model_leaves_no_thread():
    class Own(MockAsyncLM):
        def _get_logprobs(self, token_ids):
            return super()._get_logprobs(token_ids)

    others = {*engine_threads()}
    lm = Own()
    lm.next_token_logprobs_sync([1])
    lm.add_new_lora("path", "a")
    (thread,) = {*engine_threads()} - others
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def kill(lm: MockAsyncLM) -> None:
    with pytest.raises(EngineDeadError):
        lm.next_token_logprobs_sync([13])


@pytest.mark.parametrize("end", [MockAsyncLM.close, kill])
def test_a_model_that_rejected_requests_is_collected(end):
    lm = MockAsyncLM(die_on=lambda query: query.token_ids == (13,))
    end(lm)
    for _ in range(2):
        with pytest.raises((ModelClosedError, EngineDeadError)):
            lm.next_token_logprobs_sync([1])
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_an_exit_in_the_middle_of_a_batch_is_clean():
    """The model is closed before the exit hooks that its engine registered: engines shut themselves
    down in such hooks, and in finalizers, which run in one hook too."""
    result = run_python("""
        import asyncio, atexit, contextlib, threading, weakref
        from genlm.core import AsyncLM, MockAsyncLM, ModelClosedError, hookimpl
        from genlm.core.mock import ByteTokenizer, MockEngine

        def refuse(thread):
            raise RuntimeError("can't start new thread")
        start, threading.Thread.start = threading.Thread.start, refuse
        with contextlib.suppress(RuntimeError):
            MockAsyncLM()
        threading.Thread.start = start

        entered = threading.Event()
        def hold(queries):
            entered.set()
            threading.main_thread().join()  # until the interpreter has begun to exit
        class Engine(MockEngine):
            @hookimpl
            def genlm_close(self):
                print("closed")
        def load():
            engine = Engine(ByteTokenizer(), on_batch=hold)
            atexit.register(print, "the engine's hook")
            weakref.finalize(engine, print, "its finalizer")
            return engine
        lm = AsyncLM(load, backend="mine")
        def ask():
            with contextlib.suppress(ModelClosedError):
                lm.next_token_logprobs_sync([1])
        threading.Thread(target=ask).start()
        async def main():
            pending = asyncio.ensure_future(lm.next_token_logprobs([2]))
            entered.wait(30)
            raise SystemExit(3)
        asyncio.run(main())
    """)
    assert (result.returncode, result.stderr) == (3, "")
    said = result.stdout.splitlines()
    assert (said[0], sorted(said[1:])) == ("closed", ["its finalizer", "the engine's hook"])


class Echo(Executor):
    def step(self, new_requests, dropped):
        return [(request, request) for request in new_requests]

    def close(self):
        pass


def ask(batcher: Batcher) -> list[int]:
    return batcher.ask([1], list)


def submit(batcher: Batcher) -> list[int]:
    async def submitted():
        return await batcher.submit([1], list)

    return asyncio.run(submitted())


def ask_more(batcher: Batcher) -> None:
    assert batcher.ask([7], list) == [7]
    assert batcher.run(lambda: 8) == 8


@pytest.mark.parametrize("way", [ask, submit])
@pytest.mark.parametrize(
    ("handler", "refusals"),
    [(ask_more, ()), (Batcher.reset, QueriesResetError), (Batcher.close, ModelClosedError)],
)
def test_signal_handler_may_use_and_close_a_model_during_a_request(way, handler, refusals):
    """The signal arrives at every line of the batcher, also while it holds its lock."""

    def last_line():
        for line in itertools.count(1):
            batcher = Batcher(Echo)
            batcher.start()
            try:
                meanwhile = functools.partial(handler, batcher)
                call = functools.partial(way, batcher)
                assert before_line(line, module.__file__, meanwhile, call) == [1]
            except refusals:
                pass
            except EOFError:
                return line
            finally:
                batcher.close()

    assert in_time(last_line) > 10


def test_a_signal_handler_may_ask_a_model_at_any_line_of_it():
    """Also where the cache's lock is held, and by methods that go on in a thread of their own."""
    numbers = itertools.count(1)

    def handler():
        lm.next_token_logprobs_sync([1, next(numbers) % 258])
        lm.sample_particles_sync([2, next(numbers) % 258], 1, max_tokens=1)

    def use():
        # One of the rows is already known.
        lm.batch_next_token_logprobs_sync([[3], [4, next(numbers) % 258]])
        lm.clear_cache()

    def last_line():
        for line in itertools.count(1):
            lm.next_token_logprobs_sync([3])
            try:
                before_line(line, CORE, handler, use)
            except EOFError:
                return line

    with MockAsyncLM() as lm:
        assert in_time(last_line) > 100


def interrupt():
    raise KeyboardInterrupt


# The signal may arrive in Hypothesis's callback of the garbage collector, which reports it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_line_of_a_load_leaves_nothing():
    """Ctrl-C arrives in the main thread, at each line of the core that it runs."""
    made, closed = [], []

    class Engine(MockEngine):
        @hookimpl
        def genlm_close(self):
            closed.append(self)

    def load():
        made.append(Engine(ByteTokenizer()))
        return made[-1]

    def last_line():
        for line in itertools.count(1):
            try:
                call = functools.partial(AsyncLM, load, backend="interrupted")
                before_line(line, CORE, interrupt, call)
            except KeyboardInterrupt:
                pass
            except EOFError:
                return line
            gc.collect()
            for thread in engine_threads():
                if thread.name == "genlm-interrupted" and thread.ident is not None:
                    thread.join(PATIENCE)
                    assert not thread.is_alive(), line
            assert len(made) - len(closed) <= 1, line  # one may be lost while it is being made
            made.clear(), closed.clear()

    MockAsyncLM().close()  # imports what is imported on first use
    gc.freeze()  # these objects need not be searched for garbage again and again
    assert in_time(last_line) > 100


def test_an_interrupt_ends_a_load_soon():
    """A load waits in Python for an event that never comes, and Ctrl-C ends it."""
    loading, never, ended = threading.Event(), threading.Event(), threading.Event()

    def load():
        loading.set()
        try:
            while not never.wait(0.01):
                pass
        finally:
            ended.set()

    def press_ctrl_c():
        loading.wait(PATIENCE)
        os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=press_ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            AsyncLM(load, backend="slow")
    finally:
        signal.signal(signal.SIGINT, previous)
    assert ended.wait(PATIENCE)


def test_a_forked_child_is_told_waits_for_no_lock_and_exits_cleanly():
    """Threads of the parent hold the locks of a batcher and of a cache when it forks."""
    result = run_python("""
        import asyncio, os, signal, sys, threading, warnings
        import torch
        from genlm.core import EngineDeadError, MockAsyncLM
        from genlm.core.runtime.batcher import Batcher, Executor
        from genlm.core.cache import OutputCache

        class Blocking:
            \"\"\"Holds whoever hashes it for the ``at``-th time.\"\"\"
            def __init__(self, at):
                self.left, self.reached, self.go_on = at, threading.Event(), threading.Event()
            def __hash__(self):
                self.left -= 1
                if self.left == 0:
                    self.reached.set()
                    self.go_on.wait()
                return 0

        class Echo(Executor):
            def step(self, new_requests, dropped):
                return [(request, request) for request in new_requests]
            def close(self):
                pass

        async def submit():
            return await batcher.submit([1], list)

        lm, batcher, cache = MockAsyncLM(), Batcher(Echo), OutputCache()
        batcher.start()
        cache.put([("known", torch.zeros(1))], cache.generation)
        cache.put([(in_cache := Blocking(at=0), torch.zeros(1))], cache.generation)
        in_cache.left = 2  # the second time is under the lock
        in_batcher = Blocking(at=1)
        for held, use in (
            (in_batcher, lambda: batcher.ask([in_batcher], list)),
            (in_cache, lambda: cache.get(in_cache)),
        ):
            threading.Thread(target=use).start()
            held.reached.wait()
        # Since Python 3.12, forking a process with threads warns, and this test does so on purpose.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        child = os.fork()
        if not child:
            signal.alarm(60)
            told = 0
            for ask in (
                lambda: lm.next_token_logprobs_sync([1]),
                lambda: batcher.ask([1], list),
                lambda: asyncio.run(submit()),
                lambda: batcher.run(int),
                batcher.reset,
                batcher.require_open,
            ):
                try:
                    ask()
                except EngineDeadError as error:
                    told += "forked" in str(error)
            batcher.close()
            cache.clear()
            sys.exit(told if cache.get("known") is None else 99)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        in_batcher.go_on.set()
        in_cache.go_on.set()
        print(lm.next_token_logprobs_sync([2]).shape)
    """)
    assert (result.stdout, result.stderr) == ("6\ntorch.Size([258])\n", "")


def test_forked_child_can_load_a_model():
    """Another thread of the parent changes the collector's settings when the parent forks."""
    result = run_python("""
        import gc, os, signal, threading, warnings
        from genlm.core import MockAsyncLM
        from genlm.core.collector import COLLECTOR

        setting, go_on, before = threading.Event(), threading.Event(), gc.get_threshold

        def get_threshold():
            setting.set()
            go_on.wait()
            return before()

        gc.get_threshold = get_threshold
        parent = threading.Thread(target=MockAsyncLM)
        parent.start()
        setting.wait()
        gc.get_threshold = before
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        child = os.fork()
        if not child:
            signal.alarm(60)
            with COLLECTOR.rarely():
                pass
            with MockAsyncLM() as own:
                os._exit(own.next_token_logprobs_sync([1]).shape[0] % 256)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        go_on.set()
        parent.join()
    """)
    assert (result.stdout, result.stderr) == ("2\n", "")


def test_a_forked_child_collects_garbage_as_the_program_had_set_it():
    """The parent's models do not count in the child, where they are never closed; the child's own
    models do."""
    result = run_python("""
        import gc, os, warnings
        from genlm.core import MockAsyncLM
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        before = gc.get_threshold()

        def in_a_child(check):
            child = os.fork()
            if not child:
                os._exit(not check())
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        def with_its_own():
            with MockAsyncLM():
                rarely = gc.get_threshold() > before
            return rarely and gc.get_threshold() == before

        with MockAsyncLM():
            print(in_a_child(lambda: gc.get_threshold() == before), in_a_child(with_its_own))
            print(in_a_child(lambda: in_a_child(with_its_own) == 0), gc.get_threshold() > before)
            gc.set_threshold(123)
            print(in_a_child(lambda: gc.get_threshold()[0] == 123))
    """)
    assert (result.stdout, result.stderr) == ("0 0\n0 True\n0\n", "")


def test_a_model_may_be_dropped_from_its_own_engine_thread(gate):
    """The last reference goes while the engine thread collects garbage: it must not wait for
    itself."""
    held: list[MockAsyncLM] = []

    def drop(queries):
        gate(queries)
        held.clear()
        gc.collect()

    async def ask_and_leave():
        asked = await busy(held[0], gate, [1])
        asked.cancel()
        await asyncio.wait([asked])

    others = {*engine_threads()}
    held.append(MockAsyncLM(on_batch=drop))
    gone = weakref.ref(held[0])
    (thread,) = {*engine_threads()} - others
    asyncio.run(ask_and_leave())
    gate.open()
    thread.join(30)
    assert gone() is None
    assert not thread.is_alive()


def test_a_copy_of_a_model_is_the_model(mock):
    lm = mock()
    holder = {"lm": lm, "more": [1]}
    assert copy.copy(lm) is lm
    assert copy.deepcopy(holder)["lm"] is lm
    assert copy.deepcopy(holder)["more"] is not holder["more"]
    with pytest.raises(
        UnsupportedError, match=r"MockAsyncLM cannot be pickled: .* in each process"
    ):
        pickle.dumps(holder)
