"""The engine thread: gathers requests, deduplicates them, batches them, and delivers the answers.

A :class:`Batcher` knows nothing of language models. It owns one thread, on which it calls an
:class:`Executor` with everything asked since the last call. Nothing waits by default: while the
executor works, requests queue; when it is free it takes all of them. A request from a coroutine is
held until one pass of its event loop adds no other request, a batch is full, or a hundred passes
are over. So requests gathered together make one batch, and a single one is not delayed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

from genlm.core.checks import safe_repr
from genlm.core.errors import EngineDeadError, ModelClosedError, QueriesResetError
from genlm.core.logs import get_logger
from genlm.core.runtime.delivery import Delivery
from genlm.core.runtime.engine_thread import EngineThread
from genlm.core.runtime.request_queue import (
    ROWS,
    Counters,
    Lane,
    Pending,
    RequestQueue,
    Task,
    Waiting,
)
from genlm.core.runtime.timeline import Timeline

log = get_logger()

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")
T = TypeVar("T")
A_co = TypeVar("A_co", covariant=True)


class Executor(Protocol[R, A_co]):
    """What the engine thread drives. All methods but ``wake`` are called on that thread."""

    @property
    def drops(self) -> bool:
        """Whether ``step`` drops requests."""
        return False

    def lane(self, request: R) -> Lane:
        """The lane of a request."""
        return ROWS

    def step(
        self, newcomers: Sequence[R], dropped: Sequence[R]
    ) -> Iterable[tuple[R, A_co | Exception]]:
        """Admit ``newcomers``, drop ``dropped``, and return the answers; requests without an answer
        are still in flight.

        If it raises, nothing can be answered any more.
        """
        ...

    def wake(self) -> None:
        """Make the current step return early, if it can. Called on any thread."""
        return None

    def close(self) -> None:
        """Release everything. Called last."""
        ...


@frozen
class Step(Generic[R]):
    """One call of the executor's ``step``."""

    newcomers: list[R]
    dropped: list[R]


class Batcher(Generic[R, A]):
    """Batches requests from any number of event loops and threads onto one engine thread.

    Args:
        start: Builds the executor, on the engine thread. Its exception is raised here.
        name: The engine thread's name.
        batch_size: The most requests in flight at once; ``None`` means no limit.
        timeout: Seconds to hold a batch open after its first request.
        share: Copies an answer for a further caller.
        timeline: Receives requests, batches, and the time spent queueing and delivering.
    """

    def __init__(
        self,
        start: Callable[[], Executor[R, A]],
        *,
        name: str = "genlm-engine",
        batch_size: int | None = None,
        timeout: float = 0.0,
        share: Callable[[A], A] = lambda answer: answer,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeout = timeout
        self._timeline = timeline or Timeline()
        self.counters = Counters()
        self._delivery = Delivery(share, self.counters, self._timeline)
        self._queue: RequestQueue[R, A] = RequestQueue(batch_size, self._timeline, self.counters)
        self._running: Pending[R, A] = {}  # the engine thread's own
        self._executor: Executor[R, A] | None = None  # until the engine thread ends
        self._stepping = False  # whether a step is running and has not been woken
        self._drops = False  # whether the executor drops requests
        self._gone = False  # whether a caller has gone since the engine thread last looked
        self._thread = EngineThread(name, self.close)
        self._lock = self._thread.lock
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        # ``start`` is passed in a list that the thread empties: the objects that it refers to must
        # be collectable while the thread runs.
        self._thread.start(functools.partial(self._main, [start], started))
        try:
            started.result()
        except BaseException:
            self.stop()
            raise

    # --- asking: any thread, any event loop -------------------------------------------------------

    def submit(self, request: R) -> asyncio.Future[A]:
        """Ask from a coroutine. Cancelling the future disturbs no other caller."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[A] = loop.create_future()
        self._thread.check_process()
        with self._lock:
            self._thread.check_open()
            if not self._queue.gathering(loop):
                # Before the gathering exists: an interrupt must not leave one without a pass.
                loop.call_soon(self._after_pass, loop)
            self._queue.gather(request, future, loop)
            # Checked again: a signal handler may have closed the model meanwhile. Then nothing
            # would answer.
            self._thread.check_open()
            self.counters.requests += 1
            self._timeline.asked(request, future)
        self._watch(future)
        return future

    def ask(self, requests: Sequence[R]) -> list[A]:
        """Ask from a plain thread, or from a coroutine that may block, and wait for all answers.

        Raises:
            Exception: the first error among the answers, after all have arrived.
        """
        futures: list[concurrent.futures.Future[A]] = [
            concurrent.futures.Future() for _ in requests
        ]
        self._thread.check_process()
        with self._lock:
            self._thread.check_open()
            for request, future in zip(requests, futures, strict=True):
                self._queue.put(request, future)
                self._timeline.asked(request, future)
            self._thread.check_open()
            self.counters.requests += len(futures)
            self._notify()
        try:
            for future in futures:
                self._watch(future)
            self._thread.wait_for(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def run(self, call: Callable[[], T]) -> T:
        """Make a call on the engine thread, after everything asked before it has been answered, and
        wait for it."""
        task = Task(call)
        self._thread.check_process()
        with self._lock:
            self._thread.check_open()
            self._queue.put_task(task)
            self._thread.check_open()
            self._notify()
        try:
            self._thread.wait_for([task.future])
            return task.future.result()
        except BaseException:
            task.future.cancel()
            raise

    def require_open(self) -> None:
        """Raise the error for a new request if the batcher cannot answer."""
        self._thread.check_process()
        with self._lock:
            self._thread.check_open()

    def reset(self) -> None:
        """Fail every request that the engine has not taken yet with :class:`QueriesResetError`."""
        self._thread.check_process()
        with self._lock:
            dropped = self._queue.withdraw(tasks=False)
        self._delivery.fail(dropped, dropped_by_reset)

    def stop(self) -> None:
        """Ask the engine thread to end, without waiting for it. Safe in a finalizer."""
        if self._thread.forked:
            return
        with self._lock:
            self._thread.stop()
            self._notify()

    def close(self, patience: float | None = None) -> None:
        """Fail what is pending, let the current step end, release the engine. Idempotent.

        Args:
            patience: The most seconds to wait for the engine thread to end; ``None`` is no limit.
        """
        if self._thread.forked:
            return
        self.stop()
        with self._lock:
            dropped = self._queue.withdraw()
        self._delivery.fail(dropped, closed_while_pending)
        self._thread.join(patience)

    def _after_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._lock:
            if self._queue.passed(loop):
                loop.call_soon(self._after_pass, loop)
            else:
                self._notify()

    def _notify(self) -> None:
        """Wake the engine thread. Called with the lock."""
        self._thread.rouse()
        if self._stepping and self._executor is not None:
            self._stepping = False  # once for each step
            self._executor.wake()

    def _watch(self, future: Waiting[Any]) -> None:
        """Notice when a caller goes, if the executor drops requests."""
        if self._drops:
            future.add_done_callback(self._caller_done)

    def _caller_done(self, future: Waiting[Any]) -> None:
        if future.cancelled():
            with self._lock:
                self._gone = True
                self._notify()

    # --- the engine thread ------------------------------------------------------------------------

    def _main(
        self, start: list[Callable[[], Executor[R, A]]], started: concurrent.futures.Future[None]
    ) -> None:
        try:
            executor = start.pop()()
        except BaseException as error:
            self.stop()
            started.set_exception(error)
            return
        self._thread.engine_is_loaded()
        self._executor, self._drops = executor, executor.drops
        self._queue.lane_of = executor.lane
        started.set_result(None)
        try:
            while (work := self._take()) is not None:
                self._do(executor, work)
                # A task refers to its caller, who must be collectable while this waits.
                del work
        except BaseException as error:
            self._die(error)
        finally:
            self._end(executor)

    def _do(self, executor: Executor[R, A], work: Task[Any] | Step[R]) -> None:
        if isinstance(work, Task):
            work.run()
        else:
            began = self._timeline.clock()
            answers = list(executor.step(work.newcomers, work.dropped))
            self._delivery.answer(
                (self._running.pop(request), answer) for request, answer in answers
            )
            self._timeline.batch(began, len(work.newcomers))

    def _take(self) -> Task[Any] | Step[R] | None:
        """Wait for work. No newcomers means a step for the requests in flight alone."""
        with self._lock:
            self._stepping = False
            while True:
                while not (self._thread.stopping or self._running or self._queue):
                    self._thread.sleep()
                if self._timeout and not (self._thread.stopping or self._running):
                    self._hold_open()
                if self._thread.stopping:
                    return None
                self._queue.sort(self._running)
                dropped = self._drop()
                work = self._queue.take(self._running, dropping=bool(dropped))
                if isinstance(work, Task):
                    return work
                if work or dropped or self._running:
                    self._stepping = True
                    return Step(work, dropped)

    def _drop(self) -> list[R]:
        """Take the requests whose callers have all gone out of flight, and return them."""
        if not self._gone:
            return []
        self._gone = False
        dropped = [
            request
            for request, waiting in self._running.items()
            if all(future.done() for future in waiting)
        ]
        for request in dropped:
            self.counters.cancelled += len(self._running.pop(request))
        return dropped

    def _hold_open(self) -> None:
        """Wait up to ``timeout`` for the batch to fill. A task or the end of the model ends the
        wait."""
        deadline = time.monotonic() + self._timeout
        while not (self._thread.stopping or self._queue.full()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._thread.sleep(remaining)

    def _fail_running(self, error: Callable[[], Exception]) -> None:
        self._delivery.fail(itertools.chain(*self._running.values()), error)
        self._running.clear()

    def _die(self, cause: BaseException) -> None:
        """The executor cannot continue: fail everything, refuse everything."""
        own_words = isinstance(cause, EngineDeadError)
        message = str(cause) if own_words else f"the engine died: {safe_repr(cause)}"
        log.error("engine.died", error=safe_repr(cause))
        with self._lock:
            # Without the cause, which also has frames.
            self._thread.refuse(functools.partial(EngineDeadError, message))
            dropped = self._queue.withdraw()
        dead = functools.partial(died, message, cause)
        self._delivery.fail(dropped, dead)
        self._fail_running(dead)

    def _end(self, executor: Executor[R, A]) -> None:
        self.stop()
        with self._lock:
            self._executor = None
            dropped = self._queue.withdraw()
        self._delivery.fail(dropped, closed_while_pending)
        self._fail_running(closed_while_pending)
        try:
            executor.close()
        except Exception:
            log.exception("engine.close_failed")


def closed_while_pending() -> ModelClosedError:
    return ModelClosedError("the model was closed before this request was answered")


def dropped_by_reset() -> QueriesResetError:
    return QueriesResetError("reset_async_queries() dropped this request before the engine took it")


def died(message: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error
