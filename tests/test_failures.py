"""Cancellation, poison, death: nothing hangs, and nobody pays for another."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import threading
import traceback
import weakref
from functools import partial

import pytest
import torch

from genlm.conformance.driver import started, submitted
from genlm.core import AsyncLM, EngineDeadError, EngineError, PluginError, ReentrancyError, hookimpl
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.core.runtime.askers import ASKING, Asker

from .conftest import PATIENCE, busy, gathered
from .doubles import Processor, Unshowable
from .lines import in_time

pytestmark = pytest.mark.any_version

both = pytest.mark.parametrize("continuous", [False, True])


@both
async def test_request_of_cancelled_callers_is_counted_and_not_computed(mock, gate, continuous):
    lm = mock(continuous=continuous)
    blocker = await busy(lm, gate, [0])
    *gone, left = await started(
        *map(lm.next_token_logprobs, [[9], [9], [1, 2]]),
        lm.batch_next_token_logprobs([[9, i] for i in range(3)]),
        lm.next_token_logprobs([1, 2]),
    )
    for task in gone:
        task.cancel()
    await submitted()
    gate.open()
    await asyncio.gather(blocker, left)
    lm.clear_kv_cache()  # waits until earlier requests have been processed
    assert not any(ids[0] == 9 for batch in gate.batches for ids in batch)
    assert lm.stats.cancelled == 6


class Fatal(BaseException):
    __str__ = __repr__ = Unshowable.__str__


@both
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError("lost"), "OSError: lost"),
        (Unshowable, "Unshowable: <its text cannot be shown: RuntimeError>"),
        (NotImplementedError, r"NotImplementedError: raised in \S+\.on_batch"),
    ],
)
def test_error_fails_its_own_request_and_names_it_and_the_cause(mock, continuous, error, said):
    def on_batch(queries):
        if any(query.token_ids == (3, 1) for query in queries):
            raise error

    lm = mock(on_batch=on_batch, continuous=continuous)
    row, *failed = gathered(*map(lm.next_token_logprobs, [[1], [3, 1], [3, 1]]))
    assert isinstance(row, torch.Tensor)
    for each in failed:
        assert isinstance(each, EngineError)
        assert "[3, 1]" in str(each)
        assert re.search(said, str(each))
    assert lm.stats.failed == 2


@pytest.mark.parametrize(
    ("error", "said"),
    [(KeyboardInterrupt, "KeyboardInterrupt"), (Fatal, "whose repr raised RuntimeError")],
)
def test_base_exception_in_a_hook_ends_the_engine(mock, error, said):
    def on_batch(queries):
        raise error

    lm = mock(on_batch=on_batch)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match=said):
            lm.next_token_logprobs_sync([1])


@both
async def test_a_dead_engine_fails_everything_and_refuses_new_work(mock, gate, continuous):
    lm = mock(die_on=lambda query: query.token_ids == (13,), continuous=continuous)
    blocker = await busy(lm, gate, [13])
    queued = await started(*(lm.next_token_logprobs([i]) for i in range(3)))
    gate.open()
    errors = await asyncio.gather(blocker, *queued, return_exceptions=True)
    assert [type(error) for error in errors] == [EngineDeadError] * 4
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="told to die"):
            lm.next_token_logprobs_sync([1])
        with pytest.raises(EngineDeadError):
            lm.clear_kv_cache()
        lm.close()


@pytest.mark.parametrize(
    "failure",
    [{"fail_on": lambda query: True}, {"die_on": lambda query: True}],
    ids=["error", "death"],
)
def test_callers_of_one_request_get_errors_of_their_own_with_one_cause(mock, failure):
    lm = mock(**failure)
    errors = gathered(*(lm.next_token_logprobs([1]) for _ in range(3)))
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    assert len({id(error.__cause__) for error in errors}) == 1
    assert "told to" in str(errors[2].__cause__)


@both
def test_error_keeps_no_tensors_alive(mock, continuous):
    computed: list[weakref.ref[torch.Tensor]] = []

    def evaluate(queries):
        activations = torch.zeros(1)
        computed.append(weakref.ref(activations))
        if any(query.token_ids == (13,) for query in queries):
            raise RuntimeError("memory ran out")

    lm = mock(continuous=continuous, on_batch=evaluate)
    kept = gathered(*(lm.next_token_logprobs([i]) for i in range(10, 16)))
    lm.next_token_logprobs_sync([1])
    assert [type(each) for each in kept].count(EngineError) == 1
    assert len(computed) > 3
    assert [one() for one in computed] == [None] * len(computed)
    assert ", in evaluate" in "".join(traceback.format_exception(kept[3]))


def test_error_of_a_hook_keeps_the_local_variables_of_its_calls(mock):
    def wrong(queries, rows):
        found = 7
        raise ValueError(f"{found} is wrong")

    lm = mock(wrappers=[Processor(wrong)])
    with pytest.raises(PluginError, match="7 is wrong") as raised:
        lm.next_token_logprobs_sync([1])
    *_, (frame, _) = traceback.walk_tb(raised.value.__cause__.__traceback__)
    assert frame.f_locals["found"] == 7


def test_error_does_not_keep_a_dead_engine_alive():
    engines: list[weakref.ref[object]] = []

    class Dying(MockEngine):
        @hookimpl
        def genlm_next_token_logprobs(self, queries):
            engines.append(weakref.ref(self))
            raise EngineDeadError("the device is lost")

    load = partial(Dying, ByteTokenizer())
    with AsyncLM(load, backend="mine") as lm, pytest.raises(EngineDeadError, match="lost") as kept:
        lm.next_token_logprobs_sync([1])
    gc.collect()
    assert engines[0]() is None
    assert "raise EngineDeadError" in "".join(traceback.format_exception(kept.value))


def test_error_of_a_failed_adapter_keeps_nothing_alive(mock, monkeypatch):
    loaded: list[weakref.ref[torch.Tensor]] = []

    @hookimpl
    def loads(self, adapter):
        weights = torch.zeros(1)
        loaded.append(weakref.ref(weights))
        raise RuntimeError("memory ran out")

    monkeypatch.setattr(MockEngine, "genlm_add_lora", loads)
    with pytest.raises(RuntimeError, match="memory ran out") as kept:
        mock().add_new_lora("folder")
    assert kept.value.__traceback__ is not None
    assert loaded[0]() is None


def test_a_hook_that_asks_its_own_model_gets_an_error_instead_of_a_deadlock(mock):
    def ask_again(queries):
        with pytest.raises(ReentrancyError):
            lm.next_token_logprobs_sync([2])

    lm = mock(on_batch=ask_again)
    lm.next_token_logprobs_sync([1])


async def test_task_that_a_hook_starts_elsewhere_may_ask_the_model(mock):
    """The hook does not wait for it."""
    begun, loop = [], asyncio.get_running_loop()

    def begin(queries):
        if not begun:
            begun.append(asyncio.run_coroutine_threadsafe(lm.next_token_logprobs([2]), loop))

    lm = mock(on_batch=begin)
    await lm.next_token_logprobs([1])
    assert (await asyncio.wrap_future(begun[0])).shape == (258,)


class Meanwhile:
    """Does something in a hook."""

    does = staticmethod(lambda: None)

    @hookimpl
    def genlm_process_logprobs(self, rows):
        self.does()
        return rows


@pytest.mark.parametrize(
    "ask",
    [
        lambda lm: lm.next_token_logprobs_sync([72]),
        lambda lm: asyncio.run(lm.next_token_logprobs([72])),
        lambda lm: lm.sample_sync([72], 1, []),
    ],
    ids=["blocking", "in a loop", "a draw"],
)
def test_two_models_whose_hooks_ask_each_other_get_an_error_that_names_both(mock, ask):
    one, two = Meanwhile(), Meanwhile()
    first, second = mock(wrappers=[one]), mock(wrappers=[two])
    one.does, two.does = partial(ask, second), partial(ask, first)
    for lm in (first, second):
        (error,) = gathered(lm.next_token_logprobs([1]))
        assert isinstance(error, PluginError)
        assert "only one may ask the other" in str(error)
    two.does = lambda: None
    assert first.next_token_logprobs_sync([2]).shape == (258,)


@pytest.mark.parametrize("task", ["cache_kv", "clear_kv_cache", "close"])
def test_two_models_whose_hooks_wait_for_tasks_of_each_other_do_not_hang(mock, task):
    one, two = Meanwhile(), Meanwhile()
    first, second = mock(wrappers=[one]), mock(wrappers=[two])
    both_are_in_hooks = threading.Barrier(2)

    def wait_for(lm):
        both_are_in_hooks.wait(PATIENCE)
        getattr(lm, task)(*([[3]] if task == "cache_kv" else []))

    one.does, two.does = partial(wait_for, second), partial(wait_for, first)
    errors = gathered(first.next_token_logprobs([1]), second.next_token_logprobs([1]))
    if task == "close":
        assert not any(isinstance(error, PluginError) for error in errors)
    else:
        assert "only one may ask the other" in str(errors)
        one.does = two.does = lambda: None
        assert first.next_token_logprobs_sync([2]).shape == (258,)
    first.close(), second.close()


def test_circle_of_three_models_raises_in_the_last_one():
    one, two, three = Asker("one"), Asker("two"), Asker("three")
    one.waiting_for(two)
    end = two.waiting_for(three)
    with pytest.raises(ReentrancyError, match="of three asked one, which waits for three"):
        three.check(one)
    end(None)
    three.check(one)


def test_models_that_ask_each_other_at_once_get_errors_before_waiting(mock, monkeypatch):
    """The other model makes its request after the first check, and before this one counts as
    waiting."""

    class Late(Asker):
        def waiting_for(self, other):
            other.waiting_for(self)
            return super().waiting_for(other)

    lm = mock()
    with monkeypatch.context() as patch:
        patch.setattr(ASKING, "asker", Late("another"))
        with pytest.raises(ReentrancyError, match=r"of another asked .*, which waits"):
            lm.clear_kv_cache()
    lm.close()


class Interrupt(BaseException):
    pass


@pytest.mark.parametrize("error", [Interrupt, SystemExit])
def test_close_succeeds_even_if_its_hook_raises(mock, monkeypatch, error):
    @hookimpl
    def fail(self):
        raise error

    monkeypatch.setattr(MockEngine, "genlm_close", fail)
    in_time(mock().close)


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_request_does_not_stop_those_that_its_loop_asks_later(mock, when):
    """The interrupt comes while the request's pass of the loop is being scheduled."""
    lm = mock()

    class InterruptedLoop(asyncio.SelectorEventLoop):
        armed = False

        def call_soon(self, callback, *args, context=None):
            if when == "before":
                self.interrupt()
            handle = super().call_soon(callback, *args, context=context)
            self.interrupt()
            return handle

        def interrupt(self):
            armed, self.armed = self.armed, False
            if armed:
                raise Interrupt

    async def ask():
        asyncio.get_running_loop().armed = True
        with pytest.raises(Interrupt):
            await lm.next_token_logprobs([1])
        return await asyncio.wait_for(lm.next_token_logprobs([2]), PATIENCE)

    with asyncio.Runner(loop_factory=InterruptedLoop) as runner:
        assert runner.run(ask()).shape == (258,)


def test_interrupted_synchronous_request_is_dropped(mock, gate):
    """A thread's request that nobody waits for any more is dropped like a coroutine's."""
    lm = mock()
    gate.shut()
    threading.Thread(target=lm.next_token_logprobs_sync, args=([0],), daemon=True).start()
    gate.wait_entered()

    def raise_interrupt(*_):
        raise Interrupt

    previous = signal.signal(signal.SIGALRM, raise_interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(Interrupt):
            lm.next_token_logprobs_sync([1])
    finally:
        signal.signal(signal.SIGALRM, previous)
    gate.open()
    lm.next_token_logprobs_sync([2])
    assert [(1,)] not in gate.batches
    assert lm.stats.cancelled == 1


def test_sample_interrupted_before_it_begins_requests_nothing(mock, gate, monkeypatch):
    lm = mock()
    started: list[threading.Thread] = []
    may_run = threading.Event()

    class InterruptedThread(threading.Thread):
        def start(self):
            super().start()
            started.append(self)
            raise Interrupt

        def run(self):
            assert may_run.wait(PATIENCE)
            super().run()

    with monkeypatch.context() as patched:
        patched.setattr(threading, "Thread", InterruptedThread)
        with pytest.raises(Interrupt):
            lm.sample_sync([1], 5, [])
    may_run.set()
    (thread,) = started
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert gate.batches == []


@both
async def test_batch_call_raises_one_of_several_errors_and_logs_no_other(mock, continuous):
    lm = mock(fail_on=lambda query: query.token_ids[0] > 1, continuous=continuous)
    complaints = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, about: complaints.append(about))
    with pytest.raises(EngineError, match="the context"):
        await lm.batch_next_token_logprobs([[1], [2], [3], [0]])
    assert (await lm.batch_next_token_logprobs([[0], [1]])).shape == (2, 258)
    gc.collect()
    assert complaints == []


class Forgetful(MockEngine):
    """An engine that forgets pinned prompts when a call fails, as engines do if a failed step may
    have damaged their state. It can lack memory for one prompt, or for all."""

    no_room_for = frozenset()

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        if any(query.token_ids == (9,) for query in queries):
            self.pinned.clear()
            raise RuntimeError("a step failed")
        return super().genlm_next_token_logprobs(queries)

    @hookimpl
    def genlm_cache_prefix(self, query):
        if query.token_ids in self.no_room_for:
            self.pinned.clear()
            raise RuntimeError("no room")
        return super().genlm_cache_prefix(query)


@pytest.fixture
def forgetful():
    """An engine with three pinned prompts, one of them with an adapter, and its model."""
    engine = Forgetful(ByteTokenizer())
    with AsyncLM(lambda: engine, backend="mock") as lm:
        lm.add_new_lora("path/a", "a")
        for prompt, adapter in (([1], None), ([2], None), ([3], "a")):
            lm.cache_kv(prompt, lora_name=adapter)
        yield engine, lm


def pinned_after_a_failure(engine, lm):
    with pytest.raises(EngineError, match="a step failed"):
        lm.next_token_logprobs_sync([9])
    lm.next_token_logprobs_uncached([1, 1])
    return {query.token_ids for query in engine.pinned}


def test_pinned_prompts_are_pinned_again_after_a_failure(forgetful):
    engine, lm = forgetful
    assert pinned_after_a_failure(engine, lm) == {(1,), (2,), (3,)}
    lm.remove_lora("a")
    assert pinned_after_a_failure(engine, lm) == {(1,), (2,)}
    lm.clear_kv_cache()
    lm.cache_kv([4])
    assert pinned_after_a_failure(engine, lm) == {(4,)}


def test_prompt_that_cannot_be_pinned_again_is_given_up_alone(forgetful):
    engine, lm = forgetful
    engine.no_room_for = {(2,)}
    assert pinned_after_a_failure(engine, lm) == {(1,), (3,)}
    engine.no_room_for = {(5,)}
    with pytest.raises(EngineError, match="no room"):
        lm.cache_kv([5])
    lm.cache_kv([6])
    assert {query.token_ids for query in engine.pinned} == {(1,), (3,), (6,)}


def test_batch_without_memory_for_copies_is_divided_further(monkeypatch):
    class TakesTwo(MockEngine):
        @hookimpl
        def genlm_next_token_logprobs(self, queries):
            if len(queries) > 2:
                raise RuntimeError("too many")
            return super().genlm_next_token_logprobs(queries)

    copy, failures = torch._foreach_clamp_min, [torch.OutOfMemoryError("none left")]

    def copies(rows, least):
        if failures:
            raise failures.pop()
        return copy(rows, least)

    contexts = [[1], [2], [3], [4]]
    with AsyncLM(lambda: TakesTwo(ByteTokenizer()), backend="mock", cache_size=0) as lm:
        expected = [lm.next_token_logprobs_uncached(each) for each in contexts]
        monkeypatch.setattr(torch, "_foreach_clamp_min", copies)
        found = lm.batch_next_token_logprobs_sync(contexts)
        assert not failures
        torch.testing.assert_close(found, torch.stack(expected))
