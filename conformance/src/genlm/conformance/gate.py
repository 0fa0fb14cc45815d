"""A wrapper around the engine's hooks, with which the suite sees what reaches the engine, and holds
it."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence, Sized
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.conformance.compare import origin
from genlm.conformance.driver import Driver
from genlm.core.checks import describe_error
from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Answer, Query, Request, SampleRequest, ScoreRequest, query_of

if TYPE_CHECKING:
    import torch

#: How many times the patience the first of two who read adapters may wait for the other.
MEETING = 10


@frozen
class EngineCall:
    """One call of an evaluation hook, and what it answered."""

    hook: str
    answered: tuple[Query, ...]


class EngineGate:
    """Observes and holds evaluations. All is as it was after :meth:`reset`.

    Args:
        driver: Has the patience to hold the engine, or to wait for it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._changed = threading.Condition()
        self._inside = False
        #: What its results had against the contract, as the core tells it.
        self.violations: list[PluginError] = []
        #: What else the engine did against it, as far as it is seen here, in words.
        self.misdeeds: list[str] = []
        #: Those of both that a clause has told.
        self.told: set[str] = set()
        self._returned: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.reset()

    # --- for the clauses: any thread --------------------------------------------------------------

    def reset(self) -> None:
        """Forget what was seen, hold nothing."""
        #: The queries that have reached the engine since then.
        self.seen: list[Query] = []
        #: The calls that have ended since then.
        self.recent_calls: list[EngineCall] = []
        self._in_steps: dict[Request, None] = {}  # what the engine has that makes steps
        #: Whether a clause has the engine fail.
        self.is_provoked = False
        #: What genlm_cache_prefix has returned since then.
        self.pinned: list[bool | None] = []
        #: Where all who read an adapter meet before one goes on.
        self.readers: threading.Barrier | None = None
        #: Called in the engine's thread when a call has been answered and before it returns.
        self.on_call: Callable[[], None] | None = None
        #: Called there once, at which line of the Python code of the next step.
        self.on_line: tuple[int, Callable[[], None]] | None = None
        with self._changed:
            self._passes = math.inf  # how many calls may begin
            self._changed.notify_all()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the engine at the beginning of its next evaluation, until the end of the ``with``
        block."""
        self.hold()
        try:
            yield
        finally:
            self.release()

    def hold(self) -> None:
        """Hold the engine at the beginning of its next evaluation, until :meth:`release`."""
        self._passes = 0

    def release(self, calls: float = math.inf) -> None:
        """Let the engine go on, and hold it again after so many calls."""
        with self._changed:
            self._passes, self._inside = calls, False
            self._changed.notify_all()

    async def until_held(self) -> None:
        """Wait until the engine is being held at the beginning of an evaluation."""
        await asyncio.wrap_future(self._driver.thread(self._wait_inside))

    def _wait_inside(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self._inside, self._driver.waits):
                raise TimeoutError(f"no request reached the engine within {self._driver.waits:g} s")

    # --- around the engine: its thread ------------------------------------------------------------

    def _enter(self, queries: Sequence[Query]) -> None:
        with self._changed:
            self.seen += queries
            if self._passes == math.inf:
                return
            self._inside = True
            self._changed.notify_all()
            released = self._changed.wait_for(lambda: self._passes, self._driver.waits)
            self._inside = False
            self._passes -= 1
        if not released:
            raise TimeoutError(f"the suite held the engine for more than {self._driver.waits:g} s")

    def _ended(self, hook: str, answered: Sequence[Query]) -> None:
        self.recent_calls.append(EngineCall(hook, tuple(answered)))
        self._driver.calls += 1
        if self.on_call is not None:
            self.on_call()

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(
        self, queries: Sequence[Query]
    ) -> Generator[None, torch.Tensor, torch.Tensor]:
        self._enter(queries)
        with self._together("genlm_next_token_logprobs", queries):
            rows = yield
        self._ended("genlm_next_token_logprobs", queries)
        self._look_back()
        self._keep("genlm_next_token_logprobs", rows)
        return rows

    @contextmanager
    def _together(self, hook: str, requests: Sized) -> Iterator[None]:
        """Note an exception of a call for several requests: asked again one by one, as the core
        does, all of them may be right."""
        count = len(requests)
        try:
            yield
        except Exception as error:
            from genlm.kit.memory import is_out_of_memory  # here, since it imports PyTorch

            if count > 1 and not (self.is_provoked or is_out_of_memory(error.__cause__ or error)):
                raised = f"{describe_error(error)}{origin(error)}"
                self.misdeeds.append(f"{hook} raised for {count} requests together: {raised}")
            raise

    def _keep(self, hook: str, rows: Any) -> None:
        """Keep what the engine returned beside a copy: so an engine that uses the memory again is
        noticed. The core only reads it."""
        if hasattr(rows, "clone") and not rows.requires_grad and rows.ndim == 2:
            self._returned.append((hook, rows[:4], rows[:4].clone()))

    def _look_back(self) -> None:
        returned, self._returned = self._returned, []
        for hook, rows, copy in returned:
            if not bool((rows == copy).all() | rows.isnan().any()):
                self.misdeeds.append(
                    f"the engine wrote into rows that {hook} had returned; give away what you "
                    "return, for instance by .clone()"
                )

    @hookimpl(wrapper=True)
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> Generator[None, Sequence[Answer], Sequence[Answer]]:
        self._enter([*queries, *(one.query for one in samples), *(one.query for one in scores)])
        for request in dropped:
            self._in_steps.pop(request, None)
        self._in_steps.update(dict.fromkeys([*queries, *samples, *scores]))
        try:
            with self._together("genlm_step", self._in_steps), self._in_the_middle():
                answers = yield
        except BaseException:
            self._in_steps.clear()  # the core asks again
            raise
        for answer in answers:
            self._in_steps.pop(answer.request, None)
        self._ended("genlm_step", [query_of(answer.request) for answer in answers])
        if answers:
            self._look_back()
        for answer in answers:
            if getattr(answer.result, "ndim", None) == 1:
                self._keep("genlm_step", answer.result[None])
        return answers

    @contextmanager
    def _in_the_middle(self) -> Iterator[None]:
        """Inside the block, :attr:`on_line` happens."""
        if self.on_line is None:
            yield
            return
        line, happens = self.on_line
        lines = itertools.count()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and next(lines) == line:
                sys.settrace(None)
                self.on_line = None
                happens()
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)

    @hookimpl(wrapper=True)
    def genlm_wake(self) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            self.misdeeds.append(f"genlm_wake raised, which it must not: {error!r}{origin(error)}")
            raise

    @hookimpl(wrapper=True)
    def genlm_read_lora(self) -> Generator[None, Any, Any]:
        readers = self.readers
        try:
            contents = yield
        except BaseException:
            if readers is not None:
                readers.abort()  # nobody waits for who does not come
            raise
        if readers is not None:
            with suppress(threading.BrokenBarrierError):
                readers.wait(MEETING * self._driver.waits)
        return contents

    @hookimpl(wrapper=True)
    def genlm_cache_prefix(self) -> Generator[None, bool | None, None]:
        self.pinned.append((yield))

    @hookimpl(wrapper=True)
    def genlm_sample(self, queries: Sequence[Query]) -> Generator[None, Any, None]:
        self._enter(queries)
        with self._together("genlm_sample", queries):
            yield
        self._ended("genlm_sample", queries)

    @hookimpl(wrapper=True)
    def genlm_sequence_logprobs(self, queries: Sequence[Query]) -> Generator[None, Any, None]:
        self._enter(queries)
        with self._together("genlm_sequence_logprobs", queries):
            yield
