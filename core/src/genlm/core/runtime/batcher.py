"""The engine thread: gathers requests, deduplicates them, batches them, and delivers the answers.

A :class:`Batcher` knows nothing of language models. It owns one thread, on which it calls an
:class:`Executor` with whatever has been asked since it last looked. Nothing waits by default: while
the executor works, requests queue; when it is free it takes all of them. A request from a coroutine
is held until one pass of its event loop adds no other, a batch is full, or a hundred passes are
over. So requests gathered together make one batch, and a lone one is not held up.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import functools
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from attrs import frozen

from genlm.core.checks import shown
from genlm.core.errors import EngineDeadError, ModelClosedError, QueriesResetError, ReentrancyError
from genlm.core.logs import get_logger
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

#: How long the interpreter waits at exit for a step under way, seconds.
EXIT_PATIENCE = 60.0

#: How often a signal handler that asks looks for its answer, seconds. Only for one that interrupted
#: code which was asking itself.
POLL = 0.01


class Executor(Protocol[R, A_co]):
    """What the engine thread drives. All methods but ``wake`` are called on that thread."""

    @property
    def drops(self) -> bool:
        """Whether ``step`` takes requests back."""
        return False

    def lane(self, request: R) -> Lane:
        """What the request may be in flight with."""
        return ROWS

    def step(
        self, newcomers: Sequence[R], dropped: Sequence[R]
    ) -> Iterable[tuple[R, A_co | Exception]]:
        """Admit ``newcomers``, drop ``dropped``, and return what has been answered; requests left
        out are still in flight.

        Raising means that nothing can be answered any more.
        """
        ...

    def wake(self) -> None:
        """Make the step under way return early, if it can. Called on any thread."""
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
        timeout: Seconds to hold a batch open for latecomers after its first request.
        share: Makes a further caller's own copy of an answer.
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
        self._share = share
        self._timeline = timeline or Timeline()
        self.counters = Counters()
        # Re-entrant, because a garbage collection may call stop(), and a signal handler close(),
        # from any line, also from one that holds it.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._alarm = threading.Lock()  # free when there is something for the engine thread
        self._queue: RequestQueue[R, A] = RequestQueue(batch_size, self._timeline, self.counters)
        self._running: Pending[R, A] = {}  # the engine thread's own
        self._executor: Executor[R, A] | None = None  # until the engine thread ends
        self._stepping = False  # whether a step is under way, and has not been woken
        self._drops = False  # whether the executor takes requests back
        self._gone = False  # whether a caller has gone since the engine thread last looked
        # Makes the error for whoever asks from now on. An error that is raised keeps its callers'
        # frames, and with them the model: one that was kept here and raised each time would keep
        # the model for as long as the model keeps this.
        self._refusal: Callable[[], Exception] | None = None
        self._stopping = False
        self._ended = False
        self._exiting = False
        self._pid = os.getpid()
        started: concurrent.futures.Future[None] = concurrent.futures.Future()
        # A daemon, because Python joins other threads before it calls the exit hook that ends this
        # one. ``start`` travels in a list that the thread empties: a thread keeps its arguments for
        # as long as it runs, and what ``start`` refers to must be free to be collected.
        self._thread = threading.Thread(
            target=self._main, args=([start], started), name=name, daemon=True
        )
        self._thread.start()
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
        self._check_process()
        with self._lock:
            self._check_open()
            if not self._queue.gathering(loop):
                # Before there is a gathering: an interrupt must leave none without.
                loop.call_soon(self._after_pass, loop)
            self._queue.gather(request, future, loop)
            # Again: a signal handler may have closed the model since. Then nothing would answer.
            self._check_open()
            self.counters.requests += 1
            self._timeline.asked(request, future)
        self._watch(future)
        return future

    def ask(self, requests: Sequence[R]) -> list[A]:
        """Ask from a plain thread, or from a coroutine that may block, and wait for all answers.

        Raises:
            Exception: the first error among the answers, once all are there.
        """
        futures: list[concurrent.futures.Future[A]] = [
            concurrent.futures.Future() for _ in requests
        ]
        self._check_process()
        with self._changed:
            self._check_open()
            for request, future in zip(requests, futures, strict=True):
                self._queue.put(request, future)
                self._timeline.asked(request, future)
            self._check_open()
            self.counters.requests += len(futures)
            self._notify()
        try:
            for future in futures:
                self._watch(future)
            self._wait_for(futures)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        return [future.result() for future in futures]

    def run(self, call: Callable[[], T]) -> T:
        """Make a call on the engine thread, after everything asked before it has been answered, and
        wait for it."""
        task = Task(call)
        self._check_process()
        with self._changed:
            self._check_open()
            self._queue.put_task(task)
            self._check_open()
            self._notify()
        try:
            self._wait_for([task.future])
            return task.future.result()
        except BaseException:
            task.future.cancel()
            raise

    def require_open(self) -> None:
        """Refuse, with the error for whoever asks now, a batcher that cannot answer."""
        self._check_process()
        with self._lock:
            self._check_open()

    def reset(self) -> None:
        """Fail every request that the engine has not taken yet with :class:`QueriesResetError`."""
        self._check_process()
        with self._changed:
            dropped = self._queue.withdraw(tasks=False)
        self._fail(dropped, dropped_by_reset)

    def stop(self) -> None:
        """Ask the engine thread to end, without waiting for it. Safe in a finalizer."""
        if self._forked():
            return
        with self._changed:
            self._stopping = True
            if self._refusal is None:
                self._refusal = closed
            self._notify()

    def close(self, patience: float | None = None) -> None:
        """Fail what is pending, let the step under way end, release the engine. Idempotent.

        Args:
            patience: The most seconds to wait for the engine thread to end; ``None`` waits for as
                long as it takes.
        """
        if self._forked():
            return
        self.stop()
        with self._changed:
            dropped = self._queue.withdraw()
        self._fail(dropped, closed_while_pending)
        if threading.current_thread() is not self._thread:
            # To wait releases the lock, also of the code under a signal handler.
            with self._changed:
                ended = self._changed.wait_for(lambda: self._ended, patience)
            if ended:
                self._thread.join()

    def _forked(self) -> bool:
        """Whether this is a forked child, which has no engine thread, and perhaps a lock that
        is never released."""
        return os.getpid() != self._pid

    def _check_process(self) -> None:
        """Comes before the lock."""
        if self._forked():
            raise EngineDeadError(
                "this process was forked from the one that loaded the model; load it again here"
            )

    def _check_open(self) -> None:
        # Asked first: a new thread may have the identity of an engine thread that has ended.
        if self._refusal is not None:
            raise self._refusal()
        if threading.get_ident() == self._thread.ident:
            raise ReentrancyError(
                "a hook or wrapper asked its own model on the engine thread, which would wait for "
                "itself; ask before loading, or use the engine object directly"
            )

    def _after_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        with self._changed:
            if self._queue.passed(loop):
                loop.call_soon(self._after_pass, loop)
            else:
                self._notify()

    def _notify(self) -> None:
        """Something is there for the engine thread. Called with the lock."""
        with contextlib.suppress(RuntimeError):  # it is free already
            self._alarm.release()
        if self._stepping and self._executor is not None:
            self._stepping = False  # once for each step
            self._executor.wake()

    def _wait_for(self, futures: Iterable[concurrent.futures.Future[Any]]) -> None:
        """Wait until all are done."""
        for future in futures:
            while self._lock_is_mine() and not future.done():
                # A signal handler that interrupted code which holds the lock. To wait on the
                # condition releases it, so that the engine thread can go on.
                self._changed.wait(POLL)
            with contextlib.suppress(concurrent.futures.CancelledError):
                future.exception()  # waits

    def _lock_is_mine(self) -> bool:
        try:
            self._changed.notify(0)
        except RuntimeError:
            return False
        return True

    def _watch(self, future: Waiting[Any]) -> None:
        """Notice when a caller goes, where the executor takes requests back."""
        if self._drops:
            future.add_done_callback(self._caller_done)

    def _caller_done(self, future: Waiting[Any]) -> None:
        if future.cancelled():
            with self._changed:
                self._gone = True
                self._notify()

    # --- the engine thread ------------------------------------------------------------------------

    def _main(
        self, start: list[Callable[[], Executor[R, A]]], started: concurrent.futures.Future[None]
    ) -> None:
        try:
            self._serve(start, started)
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _serve(
        self, start: list[Callable[[], Executor[R, A]]], started: concurrent.futures.Future[None]
    ) -> None:
        # here, so that there is none where no thread could be started.
        atexit.register(self._at_exit)
        try:
            executor = start.pop()()
        except BaseException as error:
            self.stop()
            self._forget_exit_hook()
            started.set_exception(error)
            return
        # Anew: hooks run last first, and this one must run before those that the engine registered
        # while it loaded, by which engines take themselves down.
        self._forget_exit_hook()
        atexit.register(self._at_exit)
        self._executor, self._drops = executor, executor.drops
        self._queue.lane_of = executor.lane
        started.set_result(None)
        try:
            while (work := self._take()) is not None:
                self._do(executor, work)
                # A task refers to who asked for it, who must be free to be collected while this
                # waits.
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
            self._deliver(list(executor.step(work.newcomers, work.dropped)))
            self._timeline.batch(began, len(work.newcomers))

    def _take(self) -> Task[Any] | Step[R] | None:
        """Wait for work. A step without newcomers means that requests are in flight and none joins
        them."""
        with self._changed:
            self._stepping = False
            while True:
                while not (self._stopping or self._running or self._queue):
                    self._sleep()
                if self._timeout and not (self._stopping or self._running):
                    self._hold_open()
                if self._stopping:
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
        """The requests in flight all of whose callers have gone: they are not any more."""
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
        """Wait up to ``timeout`` for the batch to fill. A task or the end of the model cuts it
        short."""
        deadline = time.monotonic() + self._timeout
        while not (self._stopping or self._queue.full()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._sleep(remaining)

    def _sleep(self, seconds: float = -1.0) -> None:
        """Wait for :meth:`_notify`. Called with the lock, which others may take in the meantime.

        Not ``Condition.wait``: a garbage collection on this thread may call :meth:`stop` before
        that has queued its waiter, and a notification that finds no waiter is lost.
        """
        self._lock.release()
        try:
            self._alarm.acquire(timeout=seconds)
        finally:
            self._lock.acquire()

    def _deliver(self, answers: Iterable[tuple[R, A | Exception]]) -> None:
        outcomes: list[tuple[Waiting[A], A | Exception]] = []
        try:
            for request, answer in answers:
                waiting = self._running.pop(request)
                outcomes.append((waiting[0], answer))
                if len(waiting) > 1:
                    outcomes += [(other, self._copy(answer)) for other in waiting[1:]]
        finally:
            self._resolve(outcomes)

    def _copy(self, answer: A | Exception) -> A | Exception:
        try:
            return another(answer) if isinstance(answer, Exception) else self._share(answer)
        except Exception as error:  # no memory for one more copy concerns this caller alone
            return error

    def _fail(self, futures: Iterable[Waiting[Any]], error: Callable[[], Exception]) -> None:
        self._resolve([(future, error()) for future in futures])

    def _fail_running(self, error: Callable[[], Exception]) -> None:
        self._fail([future for waiting in self._running.values() for future in waiting], error)
        self._running.clear()

    def _resolve(self, outcomes: Iterable[tuple[Waiting[Any], Any]]) -> None:
        """Hand out answers and errors. Each event loop is woken once, however many of its futures
        are resolved."""
        began = self._timeline.clock()
        by_loop: dict[asyncio.AbstractEventLoop | None, list[tuple[Waiting[Any], Any]]] = {}
        for resolved in outcomes:
            future, outcome = resolved
            loop = None if isinstance(future, concurrent.futures.Future) else future.get_loop()
            if (of_loop := by_loop.get(loop)) is None:
                of_loop = by_loop[loop] = []
            of_loop.append(resolved)
            if isinstance(outcome, Exception):
                self.counters.failed += 1
        for loop, of_loop in by_loop.items():
            if loop is None:
                resolve(of_loop, self._timeline, began)
            else:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(resolve, of_loop, self._timeline, began)

    def _die(self, cause: BaseException) -> None:
        """The executor cannot go on: fail everything, refuse everything."""
        message = (
            str(cause) if isinstance(cause, EngineDeadError) else f"the engine died: {shown(cause)}"
        )
        log.error("engine.died", error=shown(cause))
        with self._changed:
            # Without the cause, which has frames too.
            self._refusal = functools.partial(EngineDeadError, message)
            dropped = self._queue.withdraw()
        dead = functools.partial(died, message, cause)
        self._fail(dropped, dead)
        self._fail_running(dead)

    def _end(self, executor: Executor[R, A]) -> None:
        self.stop()
        with self._changed:
            self._stepping = False
            self._executor = None
            dropped = self._queue.withdraw()
        self._fail(dropped, closed_while_pending)
        self._fail_running(closed_while_pending)
        try:
            executor.close()
        except Exception:
            log.exception("engine.close_failed")
        self._forget_exit_hook()

    # --- the end of the interpreter ---------------------------------------------------------------

    def _at_exit(self) -> None:
        if self._forked():
            return
        self._exiting = True
        self.close(EXIT_PATIENCE)
        if self._thread.is_alive():
            log.warning("engine.abandoned", thread=self._thread.name, waited_s=EXIT_PATIENCE)

    def _forget_exit_hook(self) -> None:
        if not self._exiting:  # else the hooks are running, and this one is among them
            atexit.unregister(self._at_exit)


def closed() -> ModelClosedError:
    return ModelClosedError("the model is closed; load it again to ask further requests")


def closed_while_pending() -> ModelClosedError:
    return ModelClosedError("the model was closed before this request was answered")


def dropped_by_reset() -> QueriesResetError:
    return QueriesResetError("reset_async_queries() dropped this request before the engine took it")


def died(message: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error


def another(error: Exception) -> Exception:
    """The same error for a further caller: an object that several tasks raise shows each the frames
    of the others."""
    try:
        own = copy.copy(error)
        same = str(own) == str(error)
    except Exception:  # some classes are not made from their ``args``, or cannot be shown
        return error
    own.__cause__ = error.__cause__
    return own if same else error


def resolve(resolved: Sequence[tuple[Waiting[Any], Any]], timeline: Timeline, began: float) -> None:
    """Give each future its answer or error, unless its caller has gone."""
    for future, answer in resolved:
        try:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(answer)
        except (asyncio.InvalidStateError, concurrent.futures.InvalidStateError):
            continue
        except TypeError as refused:
            # An asyncio future takes no StopIteration; those behind it must not wait for ever
            refused.__cause__ = answer
            future.set_exception(refused)
    timeline.add("delivery", began, answers=len(resolved))
