"""Interrupts at chosen lines, as a signal handler or Ctrl-C may come at any."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from .conftest import PATIENCE

T = TypeVar("T")


def in_time(call: Callable[[], T]) -> T:
    """The result of a call in a thread of its own. A hang is a failure."""
    answer: Future[T] = Future()

    def run() -> None:
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(PATIENCE)


def before_line(line: int, files: str, what: Callable[[], object], call: Callable[[], T]) -> T:
    """Make a call, and do something else before the ``line``-th line of the given files that it
    runs.

    Raises:
        EOFError: the call runs fewer lines.
    """
    lines = itertools.count(1)

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(files):
            return None
        if event == "line" and next(lines) == line:
            what()  # not traced, because the tracer runs here
        return trace

    sys.settrace(trace)
    try:
        result = call()
    finally:
        sys.settrace(None)
    if next(lines) <= line:
        raise EOFError
    return result
