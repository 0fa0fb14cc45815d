"""Running coroutines and calls that may hang."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from genlm.conformance.compare import Violation, brief, standing

T = TypeVar("T")
Outcome = Any  # an answer, or the exception in its place

#: Models of which a call hung. They are kept, because collecting a model stops it, which may hang
#: as well.
ABANDONED_MODELS: list[Any] = []

#: The name of the threads in which calls are made.
CALL_THREAD = "genlm-conformance-call"

#: How many events before a failure are told.
TOLD_EVENTS = 8

#: Within this many calls of the engine some request must be answered, however slow they are.
MAX_UNANSWERED_CALLS = 1000


class Driver:
    """Runs coroutines and calls, and says so when one hangs. An engine that is slow, on a machine
    that has other work, does not hang: it goes on from call to call.

    Args:
        patience: The most seconds to wait for what must happen before saying that it hangs. Once
            something has, what follows is waited for a twentieth of that.
    """

    #: How many calls of the engine have ended.
    calls = 0

    def __init__(self, patience: float) -> None:
        #: How long it waits now: less once something has hung.
        self.waits = self.patience = patience
        #: How often something hung.
        self.hangs = 0
        #: When the run as a whole must have ended, by ``time.monotonic``.
        self.until = math.inf
        #: The events of this clause, in order, each with how many times in a row: prompts and
        #: adapters that were pinned, cleared, bound, removed or dropped.
        self.story: deque[tuple[str, int]] = deque(maxlen=TOLD_EVENTS)
        #: Whether something was under way then.
        self.was_late = False
        #: Threads that wait for a call. One whose call hangs never comes back here.
        self._idle: list[CallThread] = []
        # The main thread has one loop for all requests: making a loop takes longer than a request.
        self._loop = LoopThread()

    def note(self, what: str) -> None:
        """Note an event, which the messages of later failures tell."""
        times = self.story.pop()[1] if self.story and self.story[-1][0] == what else 0
        self.story.append((what, times + 1))

    def told(self) -> str:
        """The events of this clause, as the end of a message; empty if there were none."""
        if not self.story:
            return ""
        done = "; ".join(what + (f" ({n} times)" if n > 1 else "") for what, n in self.story)
        return f"\n  before it: {done}"

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in this thread's event loop. A hang is a violation."""
        return self.drive(self.soon(coroutine))

    def run_all(self, coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Run coroutines together. A hang of one is a violation."""

        async def together() -> list[T]:
            return await asyncio.gather(*coroutines)

        return self.run(together())

    def drive(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, for as long as it takes. It is a violation where its event loop stands
        still: hooks that any thread may call, such as ``genlm_wake``, are called there."""
        if threading.current_thread() is not threading.main_thread():
            return asyncio.run(coroutine)
        future = self._loop.run(coroutine)
        while True:
            beat = self._loop.beat()
            try:
                return future.result(self.waits)
            except TimeoutError:
                if future.done():
                    raise
            if not beat.is_set():
                violation = self._hang("the event loop of the callers did not go on")
                self._loop = LoopThread()
                raise violation

    async def soon(self, awaitable: Awaitable[T]) -> T:
        """The result of ``awaitable``. A hang is a violation."""
        task = asyncio.ensure_future(awaitable)
        try:
            if hangs := await self._hanging([task], "a caller"):
                raise hangs
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait([task], timeout=self.waits)
            if task.done() and not task.cancelled():
                task.exception()  # Else asyncio logs that the exception was never retrieved.

    async def all_done(self, futures: Sequence[asyncio.Future[Any]]) -> bool:
        """Wait for all futures. Returns ``False`` if some hang: none of them ended within the
        patience."""
        return await self._hanging(futures, "some callers") is None

    async def _hanging(self, futures: Sequence[asyncio.Future[Any]], who: str) -> Violation | None:
        pending, standstill = set(futures), self._standstill()
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=self._wait_for(), return_when=asyncio.FIRST_COMPLETED
            )
            if pending and self.is_late:
                return self.late(f"{who} had no answer yet")
            if done:
                standstill = self._standstill()
            elif standstill():
                return self._hang(f"{who} got no answer")
        return None

    def thread(self, call: Callable[[], T]) -> concurrent.futures.Future[T]:
        """Make a call in another thread, where it may hang without holding up the suite."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        # A call cannot be taken back: its end is recorded also after its waiter has given up.
        future.set_running_or_notify_cancel()
        thread = self._idle.pop() if self._idle else CallThread(self._idle)
        thread.calls.put((call, future))
        return future

    def end_threads(self) -> None:
        """End the threads that make no call."""
        while self._idle:
            self._idle.pop().calls.put(None)

    def outcome(self, future: concurrent.futures.Future[Any]) -> Outcome:
        """The result or the exception of a call in another thread. A hang is a violation."""
        try:
            return self.wait(future)
        except Exception as error:
            if future.done():
                return error
            raise

    def wait(
        self, future: concurrent.futures.Future[T], what: str = "a call", times: float = 1
    ) -> T:
        """The result of a call in another thread. A hang, of so many times the patience, is a
        violation."""
        standstill = self._standstill()
        while True:
            try:
                return future.result(self._wait_for(times))
            except TimeoutError:
                if future.done():
                    raise
                if self.is_late:
                    raise self.late(f"{what} had not returned yet") from None
                if standstill():
                    raise self._hang(f"{what} did not return", times) from None

    def here(
        self, happens: Callable[[], Coroutine[Any, Any, None]], what: str = "a call"
    ) -> Callable[[], None]:
        """A function for another thread. It runs a coroutine in this event loop, and waits."""
        loop = asyncio.get_running_loop()
        return lambda: self.wait(asyncio.run_coroutine_threadsafe(happens(), loop), what)

    def _standstill(self) -> Callable[[], bool]:
        """Tells whether the engine has made no call since it was asked last, or too many in all for
        what it answers."""
        begun = last = self.calls

        def is_reached() -> bool:
            nonlocal last
            before, last = last, self.calls
            return last == before or last - begun > MAX_UNANSWERED_CALLS

        return is_reached

    @property
    def is_late(self) -> bool:
        """Whether the time of the run as a whole is over."""
        return time.monotonic() >= self.until

    def late(self, where: str) -> Violation:
        """The violation of a run whose time is over."""
        self.was_late = True
        return Violation(
            f"the time of the whole run was over, and {where}. To allow more time set `deadline` "
            "(--deadline); to ask less, `effort` (--quick), or take a smaller model"
        )

    def _wait_for(self, times: float = 1) -> float:
        return max(0.0, min(times * self.waits, self.until - time.monotonic()))

    def _hang(self, what: str, times: float = 1) -> Violation:
        violation = Violation(
            f"{what} within {times * self.waits:g} s: it hangs, or is so slow that `patience` "
            f"(--patience) must be raised{standing()}{self.told()}"
        )
        self.hangs += 1
        # Shrinking would hang again and again, and so may every clause after it.
        self.waits = self.patience / 20
        return violation


class CallThread:
    """A thread that makes one call after the other: starting one takes longer than most calls.

    Args:
        idle: Where it puts itself when a call has ended.
    """

    def __init__(self, idle: list[CallThread]) -> None:
        #: The calls to make, with their results; ``None`` ends the thread.
        self.calls: queue.SimpleQueue[tuple[Callable[[], Any], Any] | None] = queue.SimpleQueue()
        self._idle = idle
        threading.Thread(target=self._run, name=CALL_THREAD, daemon=True).start()

    def _run(self) -> None:
        while (one := self.calls.get()) is not None:
            call, future = one
            try:
                result = call()
            except BaseException as error:
                self._idle.append(self)
                future.set_exception(error)
            else:
                self._idle.append(self)
                future.set_result(result)
            del one, call, future
            result = None  # The answer must not live until the next call.


class LoopThread:
    """An event loop in a thread of its own, so that what stops it does not stop the suite."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def beat(self) -> threading.Event:
        """An event that is set as soon as the loop goes on."""
        beat = threading.Event()
        self.loop.call_soon_threadsafe(beat.set)
        return beat

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()


#: Methods whose calls are told in a failure that comes after them.
TOLD_METHODS = frozenset(("add_new_lora", "cache_kv", "clear_kv_cache", "remove_lora"))

#: Methods of a model that block their caller.
BLOCKING_METHODS = frozenset(
    (
        "add_new_lora",
        "batch_next_token_logprobs_sync",
        "cache_kv",
        "clear_cache",
        "clear_kv_cache",
        "close",
        "next_token_logprobs_sync",
        "next_token_logprobs_uncached",
        "remove_lora",
    )
)


class Awaited:
    """A model whose blocking calls end in a violation where they hang.

    In an event loop, and in another thread than the main one, they are the model's own: there the
    code that started the loop or the thread waits for them.
    """

    def __init__(self, lm: Any, driver: Driver) -> None:
        self._lm, self._driver = lm, driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._lm, name)
        if name not in BLOCKING_METHODS:
            return found

        @functools.wraps(found)
        def call(*arguments: Any, **options: Any) -> Any:
            given = [*map(_shown, arguments), *(f"{k}={_shown(v)}" for k, v in options.items())]
            if name in TOLD_METHODS:
                self._driver.note(f"{name}({', '.join(given)})")
            here = threading.current_thread() is threading.main_thread()
            if not here or asyncio._get_running_loop() is not None:
                return found(*arguments, **options)
            made = self._driver.thread(lambda: found(*arguments, **options))
            try:
                return self._driver.wait(made, f"{name}({', '.join(given)})")
            except Violation:
                ABANDONED_MODELS.append(self._lm)
                raise

        return call


def _shown(given: Any) -> str:
    try:
        return brief(given)
    except (TypeError, ValueError):
        return repr(given)


async def started(*requests: Coroutine[Any, Any, Any]) -> list[asyncio.Future[Any]]:
    """Ask, and hand the requests to the engine's queue."""
    asked: list[asyncio.Future[Any]] = [asyncio.ensure_future(request) for request in requests]
    await submitted()
    return asked


async def submitted() -> None:
    """Let the event loop start the tasks made so far, and hand their requests to the engine's
    queue."""
    for _ in range(5):
        await asyncio.sleep(0)


async def in_order(asked: Mapping[str, asyncio.Future[Outcome]]) -> list[str]:
    """Names in the order in which they are answered."""
    order: list[str] = []
    for name, future in asked.items():
        future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    await asyncio.wait(asked.values())
    await asyncio.sleep(0)  # Callbacks are called in the next pass of the loop.
    return order
