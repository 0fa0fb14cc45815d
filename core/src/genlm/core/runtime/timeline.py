"""The seconds that each stage takes, and every single span while a trace is recorded."""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import json
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self, TextIO

from attrs import define, field

from genlm.core.errors import InvalidInputError
from genlm.core.types import Request, query_of

Future = asyncio.Future[Any] | concurrent.futures.Future[Any]

#: The stages of a request, in order. Each is a ``..._seconds`` of :class:`~genlm.core.types.Stats`.
STAGES = ("queue", "engine", "alignment", "caching", "delivery")


class Timeline:
    """Adds up the seconds of every stage, and passes the spans to a trace, if there is one. For any
    thread.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.trace: Trace | None = None
        # Also kept per thread, so that each thread writes only its own entries, and no lock is
        # needed. A signal handler would wait for ever for a lock held by the code that it
        # interrupted, and a forked child for one that another thread of its parent held.
        self._spent: dict[tuple[int, str], float] = {}

    def spent(self) -> dict[str, float]:
        """The seconds that each stage has taken so far."""
        spent = self._spent.copy().items()  # copied, because threads may add to it meanwhile
        return {stage: sum((s for (_, of), s in spent if of == stage), 0.0) for stage in STAGES}

    def add(self, stage: str, began: float, **about: Any) -> None:
        """A stage, or a whole batch, that began at ``began`` has ended now."""
        ended = self.clock()
        mine = threading.get_ident(), stage
        self._spent[mine] = self._spent.get(mine, 0.0) + (ended - began)
        if (trace := self.trace) is not None:
            trace.span(stage, began, ended, about)


#: Stages that begin in one thread and end in another.
BETWEEN_THREADS = ("queue", "delivery")


@define(eq=False)
class Trace:
    """Records while its ``with`` block runs, and then writes what Perfetto
    (https://ui.perfetto.dev) and ``chrome://tracing`` show. The trace is kept in memory until then:
    about half a kilobyte for each request.

    Source: the "Trace Event Format" that both read. The work of one thread is a complete event;
    requests, and stages between two threads, overlap, so they are asynchronous events.

    Args:
        timeline: What to record.
        path: The file to write.

    Raises:
        InvalidInputError: the model is being traced already.
        OSError: the file cannot be written; on entering the block.
    """

    _timeline: Timeline
    _path: str
    _events: list[dict[str, Any]] = field(init=False, factory=list)
    _threads: dict[int, str] = field(init=False, factory=dict)
    _ids: Iterator[int] = field(init=False, factory=lambda: itertools.count(1))
    _file: TextIO = field(init=False)
    _entered: bool = field(init=False, default=False)

    def __enter__(self) -> Self:
        self._entered = True
        if self._timeline.trace is not None:
            raise InvalidInputError(
                f"this model is being traced into {self._timeline.trace._path!r}; end that trace "
                "first"
            )
        self._file = open(self._path, "w", encoding="utf-8")
        self._events, self._threads = [], {}  # the events of an earlier block are in its file
        self._timeline.trace = self
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._timeline.trace = None
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": t, "args": {"name": n}}
            for t, n in self._threads.items()
        ]
        with self._file:
            json.dump({"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}, self._file)

    def __del__(self) -> None:
        if not self._entered:
            warnings.warn(
                f"lm.trace({self._path!r}) has recorded nothing: write `with lm.trace(path):` "
                "around what it is to record",
                RuntimeWarning,
                stacklevel=2,
            )

    # --- what the timeline tells: from any thread -------------------------------------------------

    def span(self, name: str, began: float, ended: float, about: Mapping[str, Any]) -> None:
        """A stage or a batch, between two times of the timeline's clock."""
        if name in BETWEEN_THREADS:
            number = next(self._ids)
            self._add("b", name, began, cat=name, id=number, args=about)
            self._add("e", name, ended, cat=name, id=number)
        else:
            self._add("X", name, began, dur=round((ended - began) * 1e6, 3), args=about)

    def request(self, request: Request, future: Future) -> None:
        """Record a request that is made now, and answered when ``future`` is done."""
        now, about = self._timeline.clock, {"cat": "request", "id": next(self._ids)}

        def done(future: Future) -> None:
            if future.cancelled():
                end = "cancelled"
            else:
                error = future.exception()
                end = "answered" if error is None else type(error).__name__
            self._add("e", "request", now(), args={"end": end}, **about)

        self._add("b", "request", now(), args=_described(request), **about)
        future.add_done_callback(done)

    def hit(self, request: Request) -> None:
        """A request answered from the output cache now."""
        self._add("i", "cache hit", self._timeline.clock(), s="t", args=_described(request))

    def _add(self, phase: str, name: str, at: float, **more: Any) -> None:
        thread = threading.current_thread()
        tid = thread.native_id or 0
        self._threads[tid] = thread.name
        self._events.append(
            {"ph": phase, "name": name, "ts": round(at * 1e6, 3), "pid": 0, "tid": tid, **more}
        )


def _described(request: Request) -> dict[str, Any]:
    query = query_of(request)
    adapter = None if query.adapter is None else query.adapter.name
    return {"asked": type(request).__name__, "tokens": query.length, "adapter": adapter}
