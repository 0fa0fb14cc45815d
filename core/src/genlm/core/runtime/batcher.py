"""The engine thread: gathers requests, deduplicates them, batches them, and delivers the answers.

A :class:`Batcher` knows nothing of language models. It owns one thread, on which it calls an
:class:`Executor` with everything asked since the last call. Nothing waits by default: while the
executor works, requests queue; when it is free it takes all of them. Requests of coroutines are
held until a pass of their event loop adds no request, a batch is full, or a hundred passes are
over. So requests that are gathered together make one batch, and a single request is not delayed.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import ctypes
import itertools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

from genlm.core.checks import safe_repr
from genlm.core.collector import COLLECTOR
from genlm.core.errors import (
    EngineDeadError,
    ModelClosedError,
    QueriesResetError,
    ReentrancyError,
)
from genlm.core.logs import get_logger
from genlm.core.runtime.askers import ASKING, Asker, running_loop
from genlm.core.runtime.calls import Call, Callers, EachCall, Future, Task, combined, keep_own
from genlm.core.runtime.combiners import Combiner, EachCombiner
from genlm.core.runtime.deliveries import another, deliver
from genlm.core.runtime.frames import let_go
from genlm.core.runtime.lanes import ROWS, Counters, Lane, Lanes, Pending
from genlm.core.runtime.timeline import Timeline

log = get_logger()

T = TypeVar("T")

#: The most passes of an event loop in one gathering, as long as each adds a request. Particles that
#: start together, or in waves one pass apart, have all made their requests after a few tens of
#: passes. A loop that makes a request in every pass would never end the gathering.
MAX_PASSES = 100

#: Seconds that the interpreter waits at exit: for the current step, for an interrupted load, and
#: for a lock that is only held for moments.
EXIT_SECONDS, LOAD_SECONDS, LOCK_SECONDS = 60.0, 2.0, 2.0

#: Seconds between two looks for its result by a signal handler that interrupted code which holds
#: the lock.
POLL_SECONDS = 0.01

#: Functions that make an error. Each caller gets an error of its own.
closed = partial(ModelClosedError, "the model is closed; load it again to ask further requests")
closed_before = partial(ModelClosedError, "the model was closed before this request was answered")
dropped_by_reset = partial(
    QueriesResetError, "reset_async_queries() dropped this request before the engine took it"
)


class TryAlone(Exception):
    """Stands in place of a result if a step failed while several requests were in flight. The
    request is then tried again alone."""


class Executor(Protocol):
    """The object that the engine thread drives. All methods except ``wake`` are called on that
    thread. A request is any hashable object, a result any object except an exception."""

    @property
    def drops(self) -> bool:
        """Whether ``step`` drops requests."""
        return False

    @property
    def wakes(self) -> bool:
        """Whether a step that is woken ends early."""
        return False

    def lane(self, request: Any) -> Lane:
        """The lane of a request."""
        return ROWS

    def step(
        self, new_requests: Sequence[Any], dropped: Sequence[Any]
    ) -> Iterable[tuple[Any, Any]]:
        """Admit ``new_requests``, drop ``dropped``, and return requests with their results, or the
        exceptions in their place; requests that are not among them are still in flight.

        If it raises, nothing can be answered any more.
        """

    def wake(self) -> None:
        """Make the current step return early, if it can. Called on any thread."""
        return None

    def close(self) -> None:
        """Release everything. Called last."""


class Gathering:
    """The requests of one event loop since its last pass without a new request."""

    def __init__(self) -> None:
        self.calls: list[Call[Any]] = []
        self.requests = self.passes = 0
        self.seen = 0  # the number of requests in the previous pass


class Batcher:
    """Batches requests from any number of event loops and threads onto one engine thread.

    Args:
        load: Builds the executor, on the engine thread. Its exception is raised by :meth:`start`.
        name: The engine thread's name.
        batch_size: The most requests in flight at once; ``None`` means no limit.
        timeout: Seconds to hold a batch open after its first request.
        timeline: Receives requests, batches, and the time spent queueing and delivering.
        counters: Receive requests and what becomes of them.
        lock: Of what else callers and the executor use: who waits in a signal handler releases it.
        keeps_frames: Whether errors keep the local variables of the calls that they have ended.
    """

    def __init__(
        self,
        load: Callable[[], Executor],
        *,
        name: str = "genlm-engine",
        batch_size: int | None = None,
        timeout: float = 0.0,
        timeline: Timeline | None = None,
        counters: Counters | None = None,
        lock: threading.RLock | None = None,
        keeps_frames: bool = False,
    ) -> None:
        self._timeout = timeout
        self._keeps_frames = keeps_frames
        self._timeline = timeline or Timeline()
        self.counters = Counters() if counters is None else counters
        self.asker = Asker(name)
        # Re-entrant, because at any line, even while the lock is held, a garbage collection may
        # stop the thread, or a signal handler may make a request or close the model.
        self._lock = lock or threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._alarm = threading.Lock()  # released to wake the thread
        self._gatherings: dict[asyncio.AbstractEventLoop, Gathering] = {}
        self._lanes: Lanes = Lanes(batch_size, self._timeline, self.counters)
        # Set from the end of loading to the end of the model.
        self._executor: Executor | None = None
        self._stepping = False  # whether a step is running that has not been woken yet
        self._drops = False  # whether the executor drops requests
        self._wakes = False  # whether a step that is woken ends early
        # Whether the executor does both. Then whoever ends a call early sets `_departed`, because
        # only after that the requests in flight are searched for those to drop.
        self._watches = False
        self._departed = False  # whether requests in flight may have lost their callers
        self._stopping = self._ended = self._exiting = False
        # Makes an error for every later caller. A raised error keeps its callers' frames, and with
        # them the model. So a single error stored here would keep the model alive as long as the
        # model keeps this batcher.
        self._refusal: Callable[[], Exception] | None = None
        self._pid = os.getpid()
        self._started: concurrent.futures.Future[Executor] = concurrent.futures.Future()
        # ``load`` is passed in a list that the thread empties, because the objects that it refers
        # to must be collectable while the thread runs. The thread is a daemon, because Python joins
        # other threads before it calls the exit hook that ends this one.
        self._thread = threading.Thread(target=self._main, args=([load],), name=name, daemon=True)

    def start(self) -> Any:
        """Start the engine thread, and wait until the executor has been built, which is
        returned."""
        try:
            self._thread.start()
            # A signal that arrives just before a wait would not end it.
            while not self._started.done():
                concurrent.futures.wait([self._started], timeout=0.2)
            return self._started.result()
        except BaseException:
            self.stop()
            self._interrupt_load()
            if self._started.done():
                # The error in the future keeps the frames of the load and of the caller, and the
                # finalizer of the caller keeps this batcher.
                self._started = concurrent.futures.Future()
                self._started.cancel()
            raise

    # --- asking: any thread, any event loop -------------------------------------------------------

    def submit(self, requests: Sequence[Any], combine: Combiner[T]) -> Awaitable[T]:
        """Ask from a coroutine, which awaits the result. Cancelling it disturbs no other caller.

        Args:
            requests: One at least.
            combine: Makes the result: see :class:`Call`.
        """
        loop = running_loop()
        kind: Any = EachCall if isinstance(combine, EachCombiner) else Call
        call = kind(requests, loop.create_future(), combine, loop)
        self._check_process()
        with self._lock:
            self._check_open()
            gathering = self._gatherings.get(loop)
            if gathering is None:
                for other in [*self._gatherings]:
                    if other.is_closed():  # a closed loop makes no more passes
                        self._release(self._gatherings.pop(other))
                # The pass is scheduled before the gathering exists, so that an interrupt leaves no
                # gathering without a pass.
                loop.call_soon(self._after_pass, loop)
                gathering = self._gatherings[loop] = Gathering()
            gathering.calls.append(call)
            gathering.requests += len(requests)
            self._asked(requests, call.future)
        return self._watched(call.future) if self._watches else call.future

    async def _watched(self, future: asyncio.Future[T]) -> T:
        """Await a result; if that is cancelled, the engine thread learns it at once. A callback of
        the future would cost more, and is called for each result too."""
        try:
            return await future
        except asyncio.CancelledError:
            self._caller_left()
            raise

    def ask(self, requests: Sequence[Any], combine: Combiner[T]) -> T:
        """Ask from a plain thread, or from a coroutine that may block, and wait for the result.

        Raises:
            Exception: the first error among the results.
        """
        call: Call[T] = Call(requests, concurrent.futures.Future(), combine)
        self._check_process()
        with self._lock:
            self._check_open()
            self._lanes.put(call)
            self._asked(requests, call.future)
            self._notify()
        try:
            return self._result(call.future)
        except BaseException:
            if call.future.cancelled() and self._watches:
                self._caller_left()
            raise

    def run(self, make: Callable[[], T]) -> T:
        """Make a call on the engine thread, after all earlier requests have been answered, and wait
        for it."""
        task = Task(make, self._keeps_frames)
        self._check_process()
        with self._lock:
            self._check_open()
            for gathering in list(self._gatherings.values()):
                self._release(gathering)
            self._lanes.put(task)
            self._waited_for(task.future)
            self._notify()
        return self._result(task.future)

    def _waited_for(self, future: Future[Any]) -> None:
        """Register a call as waiting for its requests. The caller holds the lock."""
        if (asker := ASKING.asker) is not None:
            future.add_done_callback(asker.waiting_for(self.asker))
        # Checked again, because meanwhile a signal handler may have closed the model, or a hook of
        # another model made a request.
        if self._refusal is not None or asker is not None:
            try:
                self._check_open()
            except BaseException:
                future.cancel()
                raise

    def _asked(self, requests: Sequence[Any], future: Future[Any]) -> None:
        """Note the requests of a call. Called with the lock."""
        self._waited_for(future)
        self.counters["requests"] += len(requests)
        if (trace := self._timeline.trace) is not None:
            for request in requests:
                trace.request(request, future)

    def _result(self, future: Future[T]) -> T:
        try:
            return self.result_of(future)
        except BaseException:
            future.cancel()
            raise

    def result_of(self, future: Future[T]) -> T:
        """Wait for the results, which another thread makes."""
        while self._holds_lock() and not future.done():
            # A signal handler has interrupted code that holds the lock. Waiting on the condition
            # releases the lock, so that other threads can continue.
            self._changed.wait(POLL_SECONDS)
        return future.result()

    def _holds_lock(self) -> bool:
        try:
            self._changed.notify(0)  # raises if this thread does not hold it
        except RuntimeError:
            return False
        return True

    def _after_pass(self, loop: asyncio.AbstractEventLoop) -> None:
        """End a pass of an event loop: wait for another pass if this one added a request."""
        with self._lock:
            gathering = self._gatherings.get(loop)
            if gathering is None:
                return
            grown, gathering.seen = gathering.requests > gathering.seen, gathering.requests
            gathering.passes += 1
            full = gathering.requests >= self._lanes.limit
            if grown and gathering.passes < MAX_PASSES and not full:
                loop.call_soon(self._after_pass, loop)
            else:
                del self._gatherings[loop]
                self._release(gathering)
                self._notify()
                if self._stopping:  # a signal handler has closed the model meanwhile
                    self._fail(self._withdraw(), closed_before)

    def _release(self, gathering: Gathering) -> None:
        """Pass the requests that one event loop has gathered to the engine thread. The gathering
        still belongs to its loop: a signal handler may release it while a request is added."""
        calls = gathering.calls[:]
        del gathering.calls[: len(calls)]
        for call in calls:
            self._lanes.put(call)

    def _caller_left(self) -> None:
        """Have the engine thread drop the requests of a caller that was cancelled. A step that can
        be woken ends early for that."""
        with self._lock:
            self._departed = True
            self._notify()

    # --- who may ask ------------------------------------------------------------------------------

    def require_open(self) -> None:
        """Raise the error for a new request if the batcher cannot answer."""
        self._check_process()
        with self._lock:
            self._check_open()

    def _check_process(self) -> None:
        """Reject a forked child, which has no engine thread, and perhaps a lock that is never
        released. Comes before the lock."""
        if os.getpid() != self._pid:
            raise EngineDeadError(
                "this process was forked from the one that loaded the model; load it again here"
            )

    def _check_open(self) -> None:
        """Reject callers that cannot be answered. Called with the lock."""
        if self._refusal is not None:
            raise self._refusal()
        if (asker := ASKING.asker) is not None:
            asker.check(self.asker)

    # --- the end ----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Fail every request that the engine has not taken yet with :class:`QueriesResetError`."""
        self._check_process()
        callers = self._withdraw(tasks=False)
        self._fail(callers, dropped_by_reset)
        if callers and self._watches:  # other requests of the same calls may be in flight
            self._caller_left()

    def stop(self) -> None:
        """Ask the engine thread to end, without waiting for it. Safe in a finalizer."""
        if os.getpid() == self._pid:
            with self._lock:
                self._stopping = True
                if self._refusal is None:
                    self._refusal = closed
                self._notify()

    def close(self, patience: float | None = None) -> None:
        """Fail what is pending, let the current step end, release the engine. Idempotent. In a hook
        that the current step waits for, it does not wait for that step.

        Args:
            patience: The most seconds to wait for the engine thread to end; ``None`` is no limit.
        """
        if os.getpid() != self._pid:
            return
        self.stop()
        self._fail(self._withdraw(), closed_before)
        if threading.current_thread() is self._thread:
            return
        with contextlib.ExitStack() as waits:
            if (asker := ASKING.asker) is not None:
                waits.callback(asker.waiting_for(self.asker), None)
                try:
                    asker.check(self.asker)
                except ReentrancyError:
                    return
            # Waiting releases the lock, even if code that a signal handler interrupted holds it.
            with self._changed:
                ended = self._changed.wait_for(lambda: self._ended, patience)
            if ended:
                self._thread.join()

    def _withdraw(self, tasks: bool = True) -> Callers:
        with self._lock:
            for gathering in list(self._gatherings.values()):
                self._release(gathering)
            return self._lanes.withdraw(tasks)

    def _fail(self, callers: Callers, error: Callable[[], Exception]) -> None:
        """Give each caller an error of its own."""
        self.counters["failed"] += len(callers)
        self._end_calls([call for call, _ in callers if call.fail(error())])

    def _at_exit(self) -> None:
        """Registered by the engine thread, so that no hook is left if no thread could be
        started."""
        if os.getpid() != self._pid:
            return
        # A thread that wakes a step holds the lock. If the engine's wake never returns, the lock is
        # never free.
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            log.warning("engine.abandoned", thread=self._thread.name)
            return
        self._lock.release()
        self._exiting = True
        loading = self._executor is None and not self._ended
        if loading:
            self._interrupt_load()
        self.close(LOAD_SECONDS if loading else EXIT_SECONDS)
        if self._thread.is_alive():
            log.warning("engine.abandoned", thread=self._thread.name)

    def _interrupt_load(self) -> None:
        """Raise ``KeyboardInterrupt`` in the loading engine thread at its next line of Python, as
        Ctrl-C does in a main thread."""
        with self._lock:
            if self._executor is None and self._thread.is_alive() and not self._started.done():
                ident = ctypes.c_ulong(self._thread.ident or 0)
                error = ctypes.py_object(KeyboardInterrupt)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, error)
                log.warning(
                    "engine.load_interrupted",
                    thread=self._thread.name,
                    what="the load ends at its next line of Python",
                )

    # --- the engine thread ------------------------------------------------------------------------

    def _main(self, load: list[Callable[[], Executor]]) -> None:
        atexit.register(self._at_exit)
        ASKING.asker = self.asker
        executor = None
        try:
            try:
                with COLLECTOR.rarely():
                    executor = load.pop()()
                with self._lock:
                    self._executor = executor
                    self._drops, self._wakes = executor.drops, executor.wakes
                    self._watches = self._drops and self._wakes
            except BaseException as error:
                self.stop()
                self._started.set_exception(error)
                return
            # The hook is registered again. Exit hooks run in reverse order, and this one must run
            # before those that the engine registered while it loaded, since they shut the engine
            # down.
            self._forget_exit_hook()
            atexit.register(self._at_exit)
            self._lanes.lane_of = executor.lane
            with COLLECTOR.rarely():
                self._started.set_result(executor)
                self._work(executor)
        finally:
            self._end(executor)

    def _work(self, executor: Executor) -> None:
        try:
            while (work := self._take()) is not None:
                if isinstance(work, Task):
                    work.run()
                else:
                    began = self._timeline.clock()
                    self._deliver(executor.step(*work))
                    self._timeline.add("batch", began, requests=len(work[0]))
                # A task refers to its caller, which must be collectable while this thread waits.
                del work
        except BaseException as error:
            self._die(error)

    def _take(self) -> Task[Any] | tuple[list[Any], list[Any]] | None:
        """Wait for work: a task, or new and dropped requests. Without new requests, the step is for
        the requests in flight alone. ``None`` means the end."""
        lanes = self._lanes
        with self._lock:
            self._stepping = False
            while True:
                if self._timeout and not lanes.in_flight:
                    self._hold_open()
                if self._stopping:
                    return None
                dropped = self._dropped() if self._drops and lanes.in_flight else []
                work = lanes.take(dropping=bool(dropped))
                if isinstance(work, Task):
                    return work
                if work or dropped or lanes.in_flight:
                    self._stepping = True
                    return work, dropped
                self._sleep()

    def _dropped(self) -> list[Any]:
        """Take requests without callers out of flight. If callers report that they leave, not every
        step searches for such requests: a step that is woken often would look at thousands of
        requests each time."""
        if self._watches and not self._departed:
            return []
        self._departed = False
        return self._lanes.drop()

    def _hold_open(self) -> None:
        """Wait up to ``timeout`` for the batch to fill. A task or the end of the model ends the
        wait."""
        deadline = time.monotonic() + self._timeout
        while not (self._stopping or self._lanes.full()):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            self._sleep(remaining)

    def _sleep(self, seconds: float = -1.0) -> None:
        """Wait for :meth:`_notify`. Called with the lock, which others may take meanwhile.

        Not ``Condition.wait``: a garbage collection on this thread may stop the thread before its
        waiter is queued, and a notification without a waiter is lost.
        """
        self._lock.release()
        try:
            self._alarm.acquire(timeout=seconds)
        finally:
            self._lock.acquire()

    def _notify(self) -> None:
        """Wake the engine thread. Called with the lock."""
        with contextlib.suppress(RuntimeError):  # the thread is already awake
            self._alarm.release()
        if self._stepping and self._wakes and self._executor is not None:
            self._stepping = False  # at most once in each step
            self._executor.wake()

    def _deliver(self, answers: Iterable[tuple[Any, Any]]) -> None:
        """Give every caller its result."""
        suspects: Pending = {}
        ended: list[Call[Any]] = []
        given: Callers = []
        for request, result in answers:
            callers = self._lanes.in_flight.pop(request)
            if not isinstance(result, Exception):
                for call, at in callers:
                    if call.give(at, result):
                        ended.append(call)
                    else:
                        given.append((call, at))
            elif isinstance(result, TryAlone):
                suspects[request] = callers
            else:
                self.counters["failed"] += len(callers)
                for call, at in callers:
                    if call.keeps_errors and not call.give(at, result):
                        given.append((call, at))
                    elif call.keeps_errors or call.fail(result):
                        ended.append(call)
                        self._departed = True  # its other requests lose a caller
                    result = another(result)  # for the next one
        if suspects:
            with self._lock:
                self._lanes.suspect(suspects)
        parts = [(call, at) for call, at in given if call.each]
        ended += dict.fromkeys(call for call, _ in parts if not (call.left or call.error))
        if given:
            keep_own(given)
        try:
            self._end_calls(ended, parts)
        except BaseException:
            # A function of rows ends the model. These calls fail with those that are in flight.
            self._end_calls([call for call in ended if call.error is not None])
            calls = dict.fromkeys([*ended, *(call for call, _ in given)])
            self._lanes.in_flight[None] = [(call, 0) for call in calls]
            raise

    def _end_calls(
        self, calls: Iterable[Call[Any]], parts: Sequence[tuple[Call[Any], int]] = ()
    ) -> None:
        """Give callers their results, or the errors in their place. For ``parts``, see
        :func:`~genlm.core.runtime.calls.combined`."""
        began = self._timeline.clock()
        waiting = [call for call in calls if not call.future.done()]
        found = combined(waiting, parts)
        if len(found) > len(waiting):  # of parts: their other requests lose a caller
            self._departed = True
        deliver(found, self._timeline, began)

    def _die(self, cause: BaseException) -> None:
        """Fail all requests, and reject new ones, because the executor cannot continue."""
        if not self._keeps_frames:
            let_go(cause)
        own_words = isinstance(cause, EngineDeadError)
        message = str(cause) if own_words else f"the engine died: {safe_repr(cause)}"
        log.error("engine.died", error=safe_repr(cause))
        with self._lock:
            # The cause is left out, because it has frames too.
            self._refusal = partial(EngineDeadError, message)
        self._fail(self._pending(), partial(died, message, cause))

    def _end(self, executor: Executor | None) -> None:
        self.stop()
        with self._lock:
            self._executor = None
        self._fail(self._pending(), closed_before)
        if executor is not None:
            try:
                executor.close()
            except BaseException:  # any error must reach the callers that wait for the end
                log.exception("engine.close_failed")
        self._forget_exit_hook()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _pending(self) -> Callers:
        """Remove all calls that wait or are in flight, and return them."""
        in_flight, self._lanes.in_flight = self._lanes.in_flight, {}
        return [*self._withdraw(), *itertools.chain(*in_flight.values())]

    def _forget_exit_hook(self) -> None:
        if not self._exiting:  # otherwise the exit hooks are running, including this one
            atexit.unregister(self._at_exit)


def died(message: str, cause: BaseException) -> EngineDeadError:
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error
