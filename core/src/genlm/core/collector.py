"""Python's garbage collector, while very many objects are made that stay, or that live for a
step."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

#: How many new objects there must be before the collector searches them. Python's default is 700 or
#: 2,000, but a step of a thousand particles keeps 20,000 objects until it ends. Garbage among fewer
#: objects than this stays, and may hold rows, so the threshold is not higher.
COLLECTION_THRESHOLD = 50_000


class Collector:
    """Makes the garbage collector run rarely. Any number of threads may request this.

    With Python's default, the collector runs many times in a step, finds nothing, and moves the
    objects of the step to the older generation. So after a few steps it searches everything that
    was imported, which takes 0.3 seconds, two fifths of the time of a step with a thousand rows. It
    also takes a seventh of the time of loading an hf model, and three quarters of the time of
    making a vocabulary's tokens.

    The collector serves the whole process, so it is not switched off. A program's own setting is
    kept.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # re-entrant, because a signal handler may load a model
        self._users = 0
        self._before = COLLECTION_THRESHOLD
        # Whether a fork calls leave_parent() already.
        self._told = not hasattr(os, "register_at_fork")

    @contextmanager
    def rarely(self) -> Iterator[None]:
        """Inside the block, the collector runs rarely."""
        with self._lock:
            if not self._told:
                os.register_at_fork(after_in_child=self._leave_parent)
                self._told = True
            pid = self._pid
            self._users += 1
            if self._users == 1:
                self._before, *rest = gc.get_threshold()
                if 0 < self._before < COLLECTION_THRESHOLD:
                    gc.set_threshold(COLLECTION_THRESHOLD, *rest)
        try:
            yield
        finally:
            with self._lock:
                if pid == self._pid:  # otherwise the parent process has entered this context
                    self._users -= 1
                    self._restore()

    def _restore(self) -> None:
        """Restore the setting of the process once no thread requests another."""
        now, *rest = gc.get_threshold()
        # Otherwise the program has changed it meanwhile.
        if not self._users and now == COLLECTION_THRESHOLD:
            gc.set_threshold(self._before, *rest)

    def _leave_parent(self) -> None:
        """Reset in a forked child. The requesting threads are the parent's, and the child's copy of
        the lock may never be released."""
        self._pid, self._lock, self._users = os.getpid(), threading.RLock(), 0
        self._restore()


COLLECTOR = Collector()
