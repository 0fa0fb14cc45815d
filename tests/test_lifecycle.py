"""The beginning and the end: load, close, collection, exit, fork."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from genlm.core import (
    AsyncLM,
    EngineDeadError,
    MockAsyncLM,
    ModelClosedError,
    UnsupportedError,
    hookimpl,
)
from genlm.core.mock import ByteTokenizer, MockEngine

from .conftest import busy


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh interpreter; a hang is a failure."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


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


def test_an_error_while_loading_reaches_the_caller_and_leaves_no_thread():
    def load():
        raise OSError("no such model")

    with pytest.raises(OSError, match="no such model"):
        AsyncLM(load, backend="broken")
    for thread in engine_threads():
        if thread.name == "genlm-broken":
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("given", "searched_rarely"), [((700, 10, 10), True), ((0, 10, 10), False)]
)
def test_garbage_is_searched_rarely_while_a_model_loads(given, searched_rarely):
    seen = []

    def fail():
        raise OSError("no such model")

    def load():
        seen.append(gc.get_threshold())
        with pytest.raises(OSError, match="no such model"):
            AsyncLM(fail, backend="inner")
        seen.append(gc.get_threshold())
        return MockEngine(ByteTokenizer())

    before = gc.get_threshold()
    try:
        gc.set_threshold(*given)
        AsyncLM(load, backend="outer").close()
        with pytest.raises(OSError, match="no such model"):
            AsyncLM(fail, backend="broken")
        assert gc.get_threshold() == given
    finally:
        gc.set_threshold(*before)
    assert seen[0] == seen[1]
    assert (seen[0] > given) is searched_rarely


def test_use_after_close_from_a_thread_with_the_identity_of_the_engine_thread(mock):
    """The system gives a new thread the identity of one that has ended."""
    lm = mock()
    lm.close()
    for _ in range(20):
        with ThreadPoolExecutor(1) as thread, pytest.raises(ModelClosedError):
            thread.submit(lm.next_token_logprobs_sync, [1]).result()


def test_context_managers():
    with MockAsyncLM() as lm:
        lm.next_token_logprobs_sync([1])
        lm.cleanup()  # the former name
        lm.close()
    with pytest.raises(ModelClosedError):
        lm.next_token_logprobs_sync([1])  # though it is cached
    with pytest.raises(ModelClosedError, match="the model is closed"), lm:
        pass

    async def use(lm):
        async with lm:
            await lm.next_token_logprobs([1])

    asyncio.run(use(lm := MockAsyncLM()))
    with pytest.raises(ModelClosedError, match="the model is closed"):
        asyncio.run(use(lm))


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
def test_a_model_that_refused_requests_is_collected(end):
    lm = MockAsyncLM(die_on=lambda query: query.token_ids == (13,))
    end(lm)
    for _ in range(2):
        with pytest.raises((ModelClosedError, EngineDeadError)):
            lm.next_token_logprobs_sync([1])
    gone = weakref.ref(lm)
    del lm
    gc.collect()
    assert gone() is None


def test_a_refusal_shows_the_frames_of_one_request(mock):
    lm = mock()
    lm.close()

    def depth():
        with pytest.raises(ModelClosedError) as refusal:
            lm.next_token_logprobs_sync([1])
        return len(refusal.traceback)

    assert depth() == depth()


def test_the_interpreter_exits_cleanly_in_the_middle_of_a_batch():
    result = run_python("""
        import contextlib, threading
        from genlm.core import ModelClosedError, MockAsyncLM
        entered = threading.Event()
        def hold(queries):
            entered.set()
            threading.main_thread().join()  # until the interpreter has begun to exit
        lm = MockAsyncLM(on_batch=hold)
        def ask():
            with contextlib.suppress(ModelClosedError):
                lm.next_token_logprobs_sync([1])
        threading.Thread(target=ask).start()
        entered.wait(30)
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_at_exit_the_model_is_closed_before_what_its_engine_registered_for_then():
    """Engines take themselves down by such hooks, and by finalizers, which run in one hook too."""
    result = run_python("""
        import asyncio, atexit, weakref
        from genlm.core import AsyncLM, hookimpl
        from genlm.core.mock import ByteTokenizer, MockEngine
        class Engine(MockEngine):
            @hookimpl
            def genlm_close(self):
                print("closed")
        def load():
            engine = Engine(ByteTokenizer())
            atexit.register(print, "the engine's hook")
            weakref.finalize(engine, print, "its finalizer")
            return engine
        lm = AsyncLM(load, backend="mine")
        async def main():
            pending = asyncio.ensure_future(lm.next_token_logprobs([1]))
            raise SystemExit(3)
        asyncio.run(main())
    """)
    assert (result.returncode, result.stderr) == (3, "")
    said = result.stdout.splitlines()
    assert (said[0], sorted(said[1:])) == ("closed", ["its finalizer", "the engine's hook"])


def test_the_interpreter_exits_cleanly_when_no_thread_could_be_started():
    result = run_python("""
        import threading
        from genlm.core import MockAsyncLM
        def refuse(thread):
            raise RuntimeError("can't start new thread")
        start, threading.Thread.start = threading.Thread.start, refuse
        try:
            MockAsyncLM()
        except RuntimeError as error:
            print(error)
        threading.Thread.start = start
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "can't start new thread\n", "")


@pytest.mark.parametrize("way", ["ask", "submit"])
def test_a_signal_handler_may_ask_reset_and_close_while_a_request_is_being_put(way):
    """At every line of the batcher, also where it holds its lock."""
    result = run_python(f"""
        import asyncio, itertools, sys
        from genlm.core import ModelClosedError, QueriesResetError
        from genlm.core.runtime import batcher as module
        from genlm.core.runtime.batcher import Batcher, Executor

        class Echo(Executor):
            def step(self, newcomers, dropped):
                return [(request, request) for request in newcomers]
            def close(self):
                pass

        async def submit():
            return await asyncio.wait_for(batcher.submit([1], list), 60)

        def ask():
            return batcher.ask([1], list)

        def handler_asks():
            assert batcher.ask([7], list) == [7]
            assert batcher.run(lambda: 8) == 8

        def interrupted(way, handler, at):
            # Runs the handler at one line; returns the result, and whether there was such a line.
            left = at
            def trace(frame, event, argument):
                nonlocal left
                if frame.f_code.co_filename != module.__file__:
                    return None
                if event == "line":
                    left -= 1
                    if left == 0:
                        sys.settrace(None)
                        handler()
                        sys.settrace(trace)
                return trace
            try:
                sys.settrace(trace)
                return asyncio.run(submit()) if way == "submit" else ask(), left > 0
            except (ModelClosedError, QueriesResetError) as error:
                return type(error), left > 0
            finally:
                sys.settrace(None)

        allowed = {{
            "handler_asks": {{"[1]"}},
            "reset": {{"[1]", str(QueriesResetError)}},
            "close": {{"[1]", str(ModelClosedError)}},
        }}
        for name in allowed:
            seen = set()
            for at in itertools.count(1):
                batcher = Batcher(Echo)
                batcher.start()
                handler = handler_asks if name == "handler_asks" else getattr(batcher, name)
                result, passed = interrupted({way!r}, handler, at)
                batcher.close()
                if passed:
                    break
                seen.add(str(result))
            print(name, at > 10, seen <= allowed[name])
    """)
    said = ["handler_asks True True", "reset True True", "close True True"]
    assert result.stdout.splitlines() == said, result.stderr


def test_an_interrupt_at_any_line_of_a_load_leaves_nothing():
    """Ctrl-C in the main thread, at each line of the core that it runs."""
    result = run_python("""
        import gc, itertools, sys, threading
        from genlm.core import AsyncLM, MockAsyncLM, hookimpl
        from genlm.core.mock import ByteTokenizer, MockEngine

        closed = []
        class Engine(MockEngine):
            @hookimpl
            def genlm_close(self):
                closed.append(self)

        made = []
        def load():
            made.append(Engine(ByteTokenizer()))
            return made[-1]

        def interrupted(at):
            left = at
            def trace(frame, event, argument):
                nonlocal left
                name = frame.f_code.co_filename
                if "genlm" not in name:
                    return None
                if event == "line":
                    left -= 1
                    if left == 0:
                        sys.settrace(None)
                        raise KeyboardInterrupt
                return trace
            sys.settrace(trace)
            try:
                lm = AsyncLM(load, backend="mock")
                sys.settrace(None)
                lm.close()
                return left > 0
            except KeyboardInterrupt:
                return False
            finally:
                sys.settrace(None)

        MockAsyncLM().close()  # what is imported when it is first needed
        for at in itertools.count(1):
            if interrupted(at):
                break
            gc.collect()
            for thread in threading.enumerate():
                if thread.name == "genlm-mock" and thread.ident is not None:
                    thread.join(30)
                    assert not thread.is_alive(), at
            assert len(made) - len(closed) <= 1, at  # one that was lost while it was being made
            made.clear(), closed.clear()
        print(at > 100)
    """)
    # Before it, perhaps the warning of a load that was under way when the interrupt came.
    assert result.stdout.endswith("True\n"), result.stderr


def test_an_interrupt_ends_a_load_soon():
    """A load waits in Python for what never comes; Ctrl-C ends it, and the program."""
    result = run_python("""
        import os, signal, threading, time
        from genlm.core import AsyncLM
        signal.signal(signal.SIGINT, signal.default_int_handler)
        loading, ended = threading.Event(), threading.Event()
        def load():
            loading.set()
            try:
                while True:
                    time.sleep(0.01)
            finally:
                ended.set()
        def interrupt():
            loading.wait(30)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            AsyncLM(load, backend="mock")
        except KeyboardInterrupt:
            print(ended.wait(30))
    """)
    assert "True" in result.stdout.splitlines(), result.stderr  # beside a line of the log


def test_a_forked_child_is_told_and_its_exit_is_clean():
    result = run_python("""
        import os, sys
        from genlm.core import MockAsyncLM
        lm = MockAsyncLM()
        lm.next_token_logprobs_sync([1])
        child = os.fork()
        if not child:
            try:
                lm.next_token_logprobs_sync([2])
            except Exception as error:
                sys.exit(7 if "forked" in str(error) else 8)
            sys.exit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(lm.next_token_logprobs_sync([2]).shape)
    """)
    assert result.stdout == "7\ntorch.Size([258])\n", result.stderr


def test_a_forked_child_waits_for_no_lock_that_a_thread_of_its_parent_held():
    result = run_python("""
        import asyncio, os, signal, sys, threading, warnings
        import torch
        from genlm.core import EngineDeadError
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
            def step(self, newcomers, dropped):
                return [(request, request) for request in newcomers]
            def close(self):
                pass

        async def submit():
            return await batcher.submit([1], list)

        batcher, cache = Batcher(Echo), OutputCache()
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
        # From Python 3.12 on, to fork a process with threads warns of what is tested here.
        warnings.filterwarnings("ignore", ".*multi-threaded", DeprecationWarning)
        child = os.fork()
        if not child:
            signal.alarm(60)
            told = 0
            for ask in (
                lambda: batcher.ask([1], list),
                lambda: asyncio.run(submit()),
                lambda: batcher.run(int),
                batcher.reset,
                batcher.require_open,
            ):
                try:
                    ask()
                except EngineDeadError:
                    told += 1
            batcher.close()
            cache.clear()
            os._exit(told if cache.get("known") is None else 99)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        in_batcher.go_on.set()
        in_cache.go_on.set()
    """)
    assert (result.stdout, result.stderr) == ("5\n", "")


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


def test_a_load_that_fails_keeps_nothing_alive() -> None:
    made: list[weakref.ref[MockEngine]] = []

    def load() -> MockEngine:
        engine = MockEngine(ByteTokenizer())
        made.append(weakref.ref(engine))
        raise RuntimeError("no memory for the rest")

    with pytest.raises(RuntimeError, match="no memory for the rest"):
        AsyncLM(load, backend="test")
    gc.collect()
    assert made[0]() is None
