"""Cancellation, poison, death, reset: nothing hangs, and nobody pays for another."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from genlm.core import EngineDeadError, EngineError, QueriesResetError, ReentrancyError

from .conftest import PATIENCE, busy

both = pytest.mark.parametrize("continuous", [False, True])


@both
def test_cancelling_one_of_two_callers_leaves_the_other(mock, gate, continuous):
    lm = mock(continuous=continuous)

    async def ask():
        blocker = await busy(lm, gate, [0])
        one, two = (asyncio.ensure_future(lm.next_token_logprobs([1, 2])) for _ in range(2))
        neighbour = asyncio.ensure_future(lm.next_token_logprobs([3]))
        for _ in range(5):
            await asyncio.sleep(0)
        one.cancel()
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(blocker, two, neighbour)
        assert one.cancelled()
        return two.result()

    assert torch.equal(asyncio.run(ask()), lm.next_token_logprobs_uncached([1, 2]))
    assert lm.stats.cancelled == 1


@both
def test_a_query_all_of_whose_callers_have_gone_never_reaches_the_engine(mock, gate, continuous):
    lm = mock(continuous=continuous)

    async def ask():
        blocker = await busy(lm, gate, [0])
        doomed = [asyncio.ensure_future(lm.next_token_logprobs([9])) for _ in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        for task in doomed:
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        gate.open()
        await blocker
        await lm.next_token_logprobs([1])

    asyncio.run(ask())
    assert all((9,) not in batch for batch in gate.batches)
    assert lm.stats.cancelled == 3


def test_cancelling_in_the_middle_of_a_batch(mock, gate):
    lm = mock()

    async def ask():
        gate.shut()
        one, two = (asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(2))
        await asyncio.to_thread(gate.wait_entered)
        one.cancel()
        await asyncio.sleep(0)
        gate.open()
        return await two

    assert torch.equal(asyncio.run(ask()), lm.next_token_logprobs_uncached([1]))


@both
@pytest.mark.parametrize("poison", [0, 3, 7])
def test_a_poison_query_fails_alone(mock, continuous, poison):
    lm = mock(fail_on=lambda query: query.token_ids == (poison, 1), continuous=continuous)

    async def ask():
        return await asyncio.gather(
            *(lm.next_token_logprobs([i, 1]) for i in range(8)), return_exceptions=True
        )

    answers = asyncio.run(ask())
    error = answers.pop(poison)
    assert isinstance(error, EngineError)
    assert f"[{poison}, 1]" in str(error)
    assert "told to fail" in str(error.__cause__)
    assert all(isinstance(answer, torch.Tensor) for answer in answers)
    assert lm.next_token_logprobs_sync([9]).shape == (258,)
    assert lm.stats.failed == 1


@both
def test_a_dead_engine_fails_everything_and_refuses_new_work(mock, gate, continuous):
    lm = mock(die_on=lambda query: query.token_ids == (13,), continuous=continuous)

    async def ask():
        blocker = await busy(lm, gate, [13])
        queued = [asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(3)]
        for _ in range(5):
            await asyncio.sleep(0)
        gate.open()
        return await asyncio.gather(blocker, *queued, return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [EngineDeadError] * 4
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

    async def ask():
        return await asyncio.gather(
            *(lm.next_token_logprobs([1]) for _ in range(3)), return_exceptions=True
        )

    errors = asyncio.run(ask())
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    assert len({id(error.__cause__) for error in errors}) == 1
    assert "told to" in str(errors[2].__cause__)


def test_an_interrupt_on_the_engine_thread_is_its_death(mock):
    def interrupt(queries):
        raise KeyboardInterrupt

    lm = mock(on_batch=interrupt)
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        lm.next_token_logprobs_sync([1])


def test_an_adapter_call_that_raises_reaches_its_caller_alone(mock):
    from genlm.core.mock import MockEngine

    class Broken(MockEngine):
        def genlm_add_lora(self, adapter):
            raise OSError(f"no file {adapter.path}")

    from genlm.core import AsyncLM, hookimpl
    from genlm.core.mock import ByteTokenizer

    Broken.genlm_add_lora = hookimpl(Broken.genlm_add_lora)
    with AsyncLM(lambda: Broken(ByteTokenizer()), backend="broken") as lm:
        with pytest.raises(OSError, match="nowhere"):
            lm.add_new_lora("nowhere", "a")
        with pytest.raises(ValueError, match="no LoRA adapter 'a'"):
            lm.set_lora("a")
        assert lm.next_token_logprobs_sync([1]).shape == (258,)


@both
def test_reset_drops_what_is_queued_and_nothing_hangs(mock, gate, continuous):
    lm = mock(continuous=continuous)

    async def ask():
        taken = await busy(lm, gate, [0])
        queued = [asyncio.ensure_future(lm.next_token_logprobs([i])) for i in range(1, 4)]
        for _ in range(5):
            await asyncio.sleep(0)
        just_asked = asyncio.ensure_future(lm.next_token_logprobs([4]))
        await asyncio.sleep(0)
        lm.reset_async_queries()
        dropped = await asyncio.wait_for(
            asyncio.gather(*queued, just_asked, return_exceptions=True), PATIENCE
        )
        gate.open()
        return dropped, await taken, await lm.next_token_logprobs([5])

    dropped, taken, after = asyncio.run(ask())
    assert [type(error) for error in dropped] == [QueriesResetError] * 4
    assert taken.shape == after.shape == (258,)


def test_a_hook_that_asks_its_own_model_gets_an_error_instead_of_a_deadlock(mock):
    asked: list[Exception] = []

    def ask_again(queries):
        try:
            lm.next_token_logprobs_sync([2])
        except ReentrancyError as error:
            asked.append(error)

    lm = mock(on_batch=ask_again)
    lm.next_token_logprobs_sync([1])
    assert len(asked) == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_an_interrupted_request_does_not_stop_those_that_its_loop_asks_later(mock, when):
    """The interrupt comes while the request's pass of the loop is being scheduled."""
    lm = mock()

    class Interrupt(BaseException):
        pass

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


def test_an_interrupted_synchronous_caller_lets_go(mock, gate):
    """A thread's request that nobody waits for any more is dropped like a coroutine's."""
    lm = mock()
    gate.shut()
    threading.Thread(target=lm.next_token_logprobs_sync, args=([0],), daemon=True).start()
    gate.wait_entered()

    class Interrupt(BaseException):
        pass

    import signal

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


def test_a_draw_that_is_interrupted_before_it_begins_asks_nothing(mock, gate, monkeypatch):
    lm = mock()
    started: list[threading.Thread] = []
    may_run = threading.Event()

    class Interrupt(BaseException):
        pass

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


class Unshowable(Exception):
    def __str__(self):
        raise RuntimeError("cannot be shown")

    __repr__ = __str__


@pytest.mark.parametrize("continuous", [False, True])
def test_an_error_that_cannot_be_shown_fails_its_own_request(mock, continuous):
    def on_batch(queries):
        if any(query.token_ids == (13,) for query in queries):
            raise Unshowable

    lm = mock(on_batch=on_batch, continuous=continuous)

    async def ask():
        return await asyncio.gather(
            lm.next_token_logprobs([1]),
            lm.next_token_logprobs([13]),
            lm.next_token_logprobs([13]),
            return_exceptions=True,
        )

    row, *failed = asyncio.run(ask())
    assert row.shape == (258,)
    for error in failed:
        assert isinstance(error, EngineError)
        assert "Unshowable: <its text cannot be shown: RuntimeError>" in str(error)


def test_an_engine_may_die_of_an_error_that_cannot_be_shown(mock):
    class Fatal(BaseException):
        __str__ = __repr__ = Unshowable.__str__

    def on_batch(queries):
        raise Fatal

    lm = mock(on_batch=on_batch)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="whose repr raised RuntimeError"):
            lm.next_token_logprobs_sync([1])
