"""A mailbox: messages come in order, and nobody waits for ever."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque

import pytest

from genlm.core.mailbox import Mailbox

PATIENCE = 30.0


def test_messages_come_in_order():
    box = Mailbox[int]()
    for message in range(3):
        box.put(message)
    assert [box.get(), box.get(timeout=0.0), box.get(timeout=PATIENCE)] == [0, 1, 2]
    assert not box


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 1e-9])
def test_an_empty_one_says_so(timeout):
    with pytest.raises(queue.Empty):
        Mailbox[int]().get(timeout=timeout)


def test_who_waits_gets_what_comes():
    asked, answered = Mailbox[int](), Mailbox[int]()
    thread = threading.Thread(target=lambda: answered.put(asked.get() + 1), daemon=True)
    thread.start()
    asked.put(1)
    assert answered.get(timeout=PATIENCE) == 2


def test_a_time_that_is_over_is_over():
    """A ``queue.SimpleQueue`` hangs here on Python 3.11 and 3.12: between a first look and a second
    one the time has run out."""

    def ask_often() -> None:
        box = Mailbox[None]()
        for _ in range(400_000):
            box.put(None)
            box.get()  # leaves the lock free
            with contextlib.suppress(queue.Empty):
                box.get(timeout=1e-9)

    thread = threading.Thread(target=ask_often, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_message_may_interrupt_another():
    """As one of a signal handler does, at any line."""
    box = Mailbox[str]()

    class Interrupted(deque):
        def append(self, message):
            super().append(message)
            if message == "first":
                box.put("second")

    box._messages = Interrupted()
    box.put("first")
    assert [box.get(timeout=0.0), box.get(timeout=0.0)] == ["first", "second"]
    with pytest.raises(queue.Empty):
        box.get(timeout=0.0)
