"""A queue that may be put into at any line of a program, also by signal handlers."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Messages to one thread from other threads, signal handlers and the garbage collector."""

    # A ``queue.SimpleQueue`` is not used, because before Python 3.13 its ``get(timeout=...)`` may
    # wait for ever. It first tries a lock, and then computes the time left. On a busy machine this
    # may be negative, which it treats as no limit.

    def __init__(self) -> None:
        self._messages: deque[T] = deque()
        # Released when a message arrives. The release is one call in C, so `put` may interrupt
        # `put`.
        self._arrival = threading.Lock()
        self._arrival.acquire()

    def __len__(self) -> int:
        return len(self._messages)

    def put(self, message: T) -> None:
        """Add a message. Never waits."""
        self._messages.append(message)
        with contextlib.suppress(RuntimeError):  # it is already released
            self._arrival.release()

    def get(self, timeout: float | None = None) -> T:
        """Take the oldest message; wait for one if there is none.

        Args:
            timeout: The most seconds to wait; ``None`` means no limit.

        Raises:
            queue.Empty: no message came in that time.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._messages:
            left = -1.0 if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not self._arrival.acquire(timeout=left):
                raise queue.Empty
        return self._messages.popleft()
