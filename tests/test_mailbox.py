"""A mailbox: messages arrive in order, and no receiver waits for ever."""

from __future__ import annotations

import contextlib
import queue
import threading
from functools import partial

import pytest

from genlm.kit import mailbox
from genlm.kit.mailbox import Mailbox

from .conftest import PATIENCE
from .lines import before_line, in_time


def test_messages_come_in_order():
    box = Mailbox[int]()
    for message in range(3):
        box.put(message)
    assert [box.get(), box.get(timeout=0.0), box.get(timeout=PATIENCE)] == [0, 1, 2]
    assert not box


@pytest.mark.parametrize("timeout", [-1.0, 0.0, 1e-9])
def test_empty_mailbox_raises_at_once(timeout):
    with pytest.raises(queue.Empty):
        Mailbox[int]().get(timeout=timeout)


def test_waiting_thread_gets_the_message():
    asked, answered = Mailbox[int](), Mailbox[int]()
    thread = threading.Thread(target=lambda: answered.put(asked.get() + 1), daemon=True)
    thread.start()
    asked.put(1)
    assert answered.get(timeout=PATIENCE) == 2


def test_mailbox_with_an_expired_timeout_returns():
    """A ``queue.SimpleQueue`` hangs here on Python 3.11 and 3.12: between a first look and a second
    one the time has run out."""

    def ask_often() -> None:
        box = Mailbox[None]()
        for _ in range(40_000):
            box.put(None)
            box.get()  # this leaves the lock free
            with contextlib.suppress(queue.Empty):
                box.get(timeout=1e-9)

    in_time(ask_often)


@pytest.mark.parametrize("line", range(1, 4))
def test_a_message_may_interrupt_another(line):
    box = Mailbox[str]()
    interrupt = partial(box.put, "interrupting")
    in_time(lambda: before_line(line, mailbox.__file__, interrupt, lambda: box.put("first")))
    assert {box.get(timeout=0.0), box.get(timeout=0.0)} == {"first", "interrupting"}
    assert not box


@pytest.mark.parametrize("line", range(1, 5))
def test_a_message_that_comes_before_the_wait_ends_it(line):
    box = Mailbox[str]()
    interrupt = partial(box.put, "interrupting")
    said = in_time(lambda: before_line(line, mailbox.__file__, interrupt, box.get))
    assert said == "interrupting"
