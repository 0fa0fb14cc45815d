"""The engine thread from start to end: who may ask it, how it sleeps, and what happens at a fork
and when the interpreter exits."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from genlm.core.errors import EngineDeadError, ModelClosedError, ReentrancyError
from genlm.core.logs import get_logger

log = get_logger()

#: How long the interpreter waits at exit for the current step, seconds.
EXIT_PATIENCE = 60.0

#: How often a signal handler that asks looks for its answer, seconds. Only for a handler that
#: interrupted code which holds the lock.
POLL = 0.01


class EngineThread:
    """A thread that owns an engine, and the lock between it and all other threads.

    Args:
        name: The thread's name.
        close: Ends its work, given the most seconds to wait. Called when the interpreter exits.

    Attributes:
        lock: Re-entrant, because at any line, also one that holds it, a garbage collection may stop
            the thread and a signal handler may close the model.
        stopping: Whether the thread has been asked to end.
    """

    def __init__(self, name: str, close: Callable[[float], None]) -> None:
        self.lock = threading.RLock()
        self.stopping = False
        self._name = name
        self._close = close
        self._changed = threading.Condition(self.lock)
        self._alarm = threading.Lock()  # released to wake the thread
        # Makes the error for every later caller. A raised error keeps its callers' frames, and with
        # them the model: one error kept here would keep the model alive as long as the model keeps
        # this.
        self._refusal: Callable[[], Exception] | None = None
        self._ended = False
        self._exiting = False
        self._pid = os.getpid()

    def start(self, main: Callable[[], None]) -> None:
        """Start the thread, which runs ``main``."""
        # A daemon, because Python joins other threads before it calls the exit hook that ends this
        # one.
        self._thread = threading.Thread(
            target=self._run, args=([main],), name=self._name, daemon=True
        )
        self._thread.start()

    def _run(self, main: list[Callable[[], None]]) -> None:
        # In a list that is emptied: a thread keeps its arguments as long as it runs.
        self._guard_exit()  # here, so that no hook is left if no thread could be started
        try:
            main.pop()()
        finally:
            self._forget_exit_hook()
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    # --- who may ask ------------------------------------------------------------------------------

    @property
    def forked(self) -> bool:
        """Whether this is a forked child, which has no engine thread, and perhaps a lock that
        is never released."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse a forked child. Comes before the lock."""
        if os.getpid() != self._pid:
            raise EngineDeadError(
                "this process was forked from the one that loaded the model; load it again here"
            )

    def check_open(self) -> None:
        """Refuse callers that cannot be answered. Called with the lock."""
        # Checked first: a new thread may have the identity of an engine thread that has ended.
        if self._refusal is not None:
            raise self._refusal()
        if threading.get_ident() == self._thread.ident:
            raise ReentrancyError(
                "a hook or wrapper asked its own model on the engine thread, which would wait for "
                "itself; ask before loading, or use the engine object directly"
            )

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Refuse every caller from now on, with the error that this makes. Called with the lock."""
        self._refusal = error

    # --- waiting ----------------------------------------------------------------------------------

    def sleep(self, seconds: float = -1.0) -> None:
        """Wait on the thread for :meth:`rouse`. Called with the lock, which others may take
        meanwhile.

        Not ``Condition.wait``: a garbage collection on this thread may stop the thread before its
        waiter is queued, and a notification without a waiter is lost.
        """
        self.lock.release()
        try:
            self._alarm.acquire(timeout=seconds)
        finally:
            self.lock.acquire()

    def rouse(self) -> None:
        """End the thread's sleep, or its next one."""
        with contextlib.suppress(RuntimeError):  # it is already free
            self._alarm.release()

    def wait_for(self, futures: Iterable[concurrent.futures.Future[Any]]) -> None:
        """Wait, on another thread, until all are done."""
        for future in futures:
            while self._holds_lock() and not future.done():
                # A signal handler that interrupted code which holds the lock. Waiting on the
                # condition releases it, so that the engine thread can continue.
                self._changed.wait(POLL)
            with contextlib.suppress(concurrent.futures.CancelledError):
                future.exception()  # waits

    def _holds_lock(self) -> bool:
        try:
            self._changed.notify(0)  # raises if this thread does not hold it
        except RuntimeError:
            return False
        return True

    # --- the end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ask the thread to end. Called with the lock."""
        self.stopping = True
        if self._refusal is None:
            self._refusal = closed
        self.rouse()

    def join(self, patience: float | None) -> None:
        """Wait until the thread has ended, at most ``patience`` seconds; on the thread itself, do
        not wait."""
        if threading.current_thread() is self._thread:
            return
        # Waiting releases the lock, also for code that a signal handler interrupted.
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, patience)
        if ended:
            self._thread.join()

    def engine_is_loaded(self) -> None:
        """Register the exit hook again: hooks run in reverse order, and this one must run before
        those that the engine registered while it loaded, which shut engines down."""
        self._forget_exit_hook()
        self._guard_exit()

    def _guard_exit(self) -> None:
        atexit.register(self._at_exit)

    def _forget_exit_hook(self) -> None:
        if not self._exiting:  # else the hooks are running, with this one
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        if self.forked:
            return
        self._exiting = True
        self._close(EXIT_PATIENCE)
        if self._thread.is_alive():
            log.warning("engine.abandoned", thread=self._name, waited_s=EXIT_PATIENCE)


def closed() -> ModelClosedError:
    return ModelClosedError("the model is closed; load it again to ask further requests")
