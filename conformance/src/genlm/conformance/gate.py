"""An observer of the engine's calls, with which the suite sees what reaches the engine, and holds
it."""

from __future__ import annotations

import asyncio
import itertools
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any

from attrs import frozen

from genlm.conformance.compare import origin
from genlm.conformance.driver import Driver
from genlm.core.checks import describe_error
from genlm.core.errors import PluginError
from genlm.core.hookspecs import hookimpl
from genlm.core.types import Query, Request, query_of

if TYPE_CHECKING:
    import torch

#: How long the first of two readers of adapters waits for the other, in units of the patience.
MEETING_PATIENCES = 10

#: Hooks that answer a batch.
EVALUATION_HOOKS = ("genlm_next_token_logprobs", "genlm_sample", "genlm_sequence_logprobs")


@frozen
class EngineCall:
    """One call of an evaluation hook, and what it answered."""

    hook: str
    answered: tuple[Query, ...]


class EngineGate:
    """Observes and holds evaluations. After :meth:`reset` nothing is held.

    Args:
        driver: Has the patience to hold the engine, or to wait for it.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._changed = threading.Condition()
        self._inside = False
        # The trace function that was set before on_line set its own.
        self._traced: Any = None
        #: Violations of the contract that the core has found in the engine's results.
        self.violations: list[PluginError] = []
        #: Other breaches of the contract that are visible here, in words.
        self.misdeeds: list[str] = []
        #: The violations and breaches that a clause has reported.
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
        # The requests in flight of an engine with genlm_step.
        self._in_steps: dict[Request, None] = {}
        #: Whether a clause has the engine fail.
        self.is_provoked = False
        #: The results of genlm_cache_prefix since then.
        self.pinned: list[bool | None] = []
        #: Threads that read an adapter meet here before any of them continues.
        self.readers: threading.Barrier | None = None
        #: Called in the engine's thread when a call has been answered and before it returns.
        self.on_call: Callable[[], None] | None = None
        #: Called there once, at which line of the Python code of the next step.
        self.on_line: tuple[int, Callable[[], None]] | None = None
        with self._changed:
            self._passes = math.inf  # The number of calls that may still begin.
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

    # --- around the engine's calls: its thread ----------------------------------------------------

    @hookimpl
    def genlm_call_begins(self, hook: str, arguments: Mapping[str, Any]) -> None:
        if hook == "genlm_step":
            self._step_begins(arguments)
        elif hook in EVALUATION_HOOKS:
            self._enter(arguments["queries"])

    @hookimpl
    def genlm_call_ended(
        self, hook: str, arguments: Mapping[str, Any], result: Any, error: BaseException | None
    ) -> None:
        if hook == "genlm_read_lora":
            self._meet(error)
        elif hook == "genlm_cache_prefix":
            self.pinned.append(result)
        elif hook == "genlm_step":
            self._step_ended(result, error)
        elif hook in EVALUATION_HOOKS:
            self._batch_ended(hook, arguments["queries"], result, error)

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
            self.misdeeds.append(
                f"the suite held a call of the engine for more than {self._driver.waits:g} s"
            )

    def _batch_ended(
        self, hook: str, queries: Sequence[Query], result: Any, error: BaseException | None
    ) -> None:
        if error is not None:
            self._note_error(hook, len(queries), error)
            return
        self._answered(hook, queries)
        if hook == "genlm_next_token_logprobs":
            self.look_back()
            self._keep(hook, result)

    def _step_begins(self, arguments: Mapping[str, Any]) -> None:
        new = [*arguments["queries"], *arguments["samples"], *arguments["scores"]]
        self._enter([query_of(request) for request in new])
        for request in arguments["dropped"]:
            self._driver.note("a request in flight was dropped")
            self._in_steps.pop(request, None)
        self._in_steps.update(dict.fromkeys(new))
        if self.on_line is not None:
            self._traced = sys.gettrace()
            sys.settrace(self._trace_to(*self.on_line))

    def _step_ended(self, answers: Any, error: BaseException | None) -> None:
        if self._traced is not None or self.on_line is not None:
            sys.settrace(self._traced)
            self._traced = None
        if error is not None:
            self._note_error("genlm_step", len(self._in_steps), error)
            self._in_steps.clear()  # The core asks for all of them again.
            return
        for answer in answers:
            self._in_steps.pop(answer.request, None)
        self._answered("genlm_step", [query_of(answer.request) for answer in answers])
        if answers:
            self.look_back()
        for answer in answers:
            if getattr(answer.result, "ndim", None) == 1:
                self._keep("genlm_step", answer.result[None])

    def _answered(self, hook: str, queries: Sequence[Query]) -> None:
        self.recent_calls.append(EngineCall(hook, tuple(queries)))
        self._driver.calls += 1
        if self.on_call is not None:
            self.on_call()

    def _note_error(self, hook: str, count: int, error: BaseException) -> None:
        """Note an exception of a call for several requests: asked again one by one, as the core
        does, all of them may be right."""
        # Imported here, because it imports PyTorch.
        from genlm.kit.memory import is_out_of_memory

        meant = self.is_provoked or is_out_of_memory(error.__cause__ or error)
        if count > 1 and isinstance(error, Exception) and not meant:
            raised = f"{describe_error(error)}{origin(error)}"
            self.misdeeds.append(f"{hook} raised for {count} requests together: {raised}")

    def _keep(self, hook: str, rows: Any) -> None:
        """Keep what the engine returned beside a copy: so an engine that uses the memory again is
        noticed. The core only reads it."""
        if hasattr(rows, "clone") and not rows.requires_grad and rows.ndim == 2:
            self._returned.append((hook, rows[:4], rows[:4].clone()))

    def look_back(self) -> None:
        """Look whether rows that were returned are as they were, and keep them no longer."""
        returned, self._returned = self._returned, []
        for hook, rows, copy in returned:
            if not bool((rows == copy).all() | rows.isnan().any()):
                self.misdeeds.append(
                    f"the engine wrote into rows that {hook} had returned; give away what you "
                    "return, for instance by .clone()"
                )

    def _trace_to(self, line: int, happens: Callable[[], None]) -> Callable[..., Any]:
        """A trace function by which something happens at one line of the engine's Python code."""
        lines = itertools.count()

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            if frame.f_globals.get("__name__", "").startswith("pluggy"):
                return None  # Pluggy's own frames are no lines of the engine.
            if event == "line" and next(lines) == line:
                sys.settrace(None)
                self.on_line = None
                happens()
            return trace

        return trace

    def _meet(self, error: BaseException | None) -> None:
        """Make all readers of an adapter wait for each other."""
        if (readers := self.readers) is None:
            return
        if error is not None:
            readers.abort()  # The others must not wait for a reader that failed.
            return
        with suppress(threading.BrokenBarrierError):
            readers.wait(MEETING_PATIENCES * self._driver.waits)
