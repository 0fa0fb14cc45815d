"""A recording of what a model does, to look at on a timeline."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Mapping
from typing import Any, Self

from genlm.core.errors import InvalidInputError
from genlm.core.runtime.timeline import Timeline

Future = asyncio.Future[Any] | concurrent.futures.Future[Any]

#: Stages that begin in one thread and end in another.
BETWEEN_THREADS = ("queue", "delivery")


class Trace:
    """Records while its ``with`` block runs, and then writes what Perfetto (https://ui.perfetto.dev) and
    ``chrome://tracing`` show. It is kept in memory until then: about half a kilobyte for each question.

    Source: the "Trace Event Format" that both read. What one thread does is a complete event; questions, and stages between
    two threads, overlap, so they are asynchronous events.

    Args:
        timeline: What to record.
        path: The file to write.

    Raises:
        InvalidInputError: the model is being traced already.
        OSError: the file cannot be written; on entering the block.
    """

    def __init__(self, timeline: Timeline, path: str | os.PathLike[str]) -> None:
        self._timeline = timeline
        self._path = os.fspath(path)
        self._events: list[dict[str, Any]] = []
        self._threads: dict[int, str] = {}
        self._ids = itertools.count(1)
        self._written = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if self._timeline.trace is not None:
            raise InvalidInputError(f"this model is being traced into {self._timeline.trace._path!r}; end that trace first")
        self._file = self._written.enter_context(open(self._path, "w", encoding="utf-8"))
        self._events, self._threads = [], {}  # those of an earlier block are in its file
        self._timeline.trace = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timeline.trace = None
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}} for t, n in self._threads.items()
        ]
        with self._written:
            json.dump({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}, self._file)

    # --- what the timeline tells: from any thread -----------------------------------------------------------------------

    def span(self, name: str, began: float, ended: float, about: Mapping[str, Any]) -> None:
        """A stage or a batch, between two times of the timeline's clock."""
        if name in BETWEEN_THREADS:
            number = next(self._ids)
            self._add("b", name, began, cat=name, id=number, args=about)
            self._add("e", name, ended, cat=name, id=number)
        else:
            self._add("X", name, began, dur=microseconds(ended - began), args=about)

    def question(self, about: Mapping[str, Any], future: Future) -> None:
        """A question asked now and answered when ``future`` is done."""
        number = next(self._ids)
        self._add("b", "question", self._timeline.clock(), cat="question", id=number, args=about)

        def done(future: Future) -> None:
            self._add("e", "question", self._timeline.clock(), cat="question", id=number, args={"end": end_of(future)})

        future.add_done_callback(done)

    def hit(self, about: Mapping[str, Any]) -> None:
        """A question answered from the output cache now."""
        self._add("i", "cache hit", self._timeline.clock(), s="t", args=about)

    def _add(self, phase: str, name: str, at: float, **more: Any) -> None:
        thread = threading.current_thread()
        tid = thread.native_id or 0
        self._threads[tid] = thread.name
        self._events.append({"ph": phase, "name": name, "ts": microseconds(at), "pid": 0, "tid": tid, **more})


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def end_of(future: Future) -> str:
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    return "answered" if error is None else type(error).__name__
