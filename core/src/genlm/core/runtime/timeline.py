"""Where the time goes: the seconds of every stage, always; every span of it as well, while a trace is recorded."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from attrs import define

if TYPE_CHECKING:
    from genlm.core.runtime.trace import Future, Trace

#: The stages of a question's way, in order; each is a ``..._seconds`` of :class:`~genlm.core.types.Stats`.
STAGES = ("validation", "hashing", "lookup", "queue", "engine", "alignment", "caching", "delivery")

#: One question in so many is timed in its caller's thread. A prime, so as not to march in step with particles.
SAMPLED = 61


class Timeline:
    """Adds up the seconds of every stage, and passes the spans on to a trace where there is one. For any thread.

    Args:
        describe: What a trace is to say of a request: names and JSON values.
        clock: Returns seconds.
    """

    def __init__(
        self,
        describe: Callable[[Any], Mapping[str, Any]] = lambda request: {},
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clock = clock
        self.trace: Trace | None = None
        self._describe = describe
        # By thread too, so that each writes its own alone and needs no lock: a signal handler would wait for ever for one
        # that the code under it holds, and a forked child for one that a thread of its parent held.
        self._spent: dict[tuple[int, str], float] = {}
        self._untimed = 0  # without a lock: to lose one now and then changes no estimate
        self._next = 1  # how many more to the next that is timed; the first one is

    def spent(self) -> dict[str, float]:
        """The seconds that each stage has taken so far."""
        spent = dict.fromkeys(STAGES, 0.0)
        for (_, stage), seconds in self._spent.copy().items():  # threads may add to it meanwhile
            spent[stage] += seconds
        return spent

    def sample(self) -> int:
        """For how many questions, up to this one, its stages in its caller's thread are to stand; 0: do not time it."""
        self._untimed += 1
        if self._untimed < self._next and self.trace is None:
            return 0
        weight, self._untimed, self._next = self._untimed, 0, SAMPLED
        return weight

    def stage(self, name: str, weight: int = 1, **about: Any) -> Span:
        """Times a ``with`` block as a stage."""
        return Span(self, name, weight, about)

    def add(self, stage: str, began: float, weight: int = 1, **about: Any) -> None:
        """A stage that began then has ended now."""
        ended = self.clock()
        mine = threading.get_ident(), stage
        self._spent[mine] = self._spent.get(mine, 0.0) + weight * (ended - began)
        if (trace := self.trace) is not None:
            trace.span(stage, began, ended, about)

    def batch(self, began: float, requests: int) -> None:
        """The engine thread has dealt with a batch."""
        if (trace := self.trace) is not None:
            trace.span("batch", began, self.clock(), {"requests": requests})

    def asked(self, request: Any, future: Future) -> None:
        """A caller begins to wait."""
        if (trace := self.trace) is not None:
            trace.question(self._describe(request), future)

    def hit(self, request: Any) -> None:
        """A question has been answered from the output cache."""
        if (trace := self.trace) is not None:
            trace.hit(self._describe(request))


@define
class Span:
    """A stage under way."""

    _timeline: Timeline
    _stage: str
    _weight: int
    _about: dict[str, Any]
    _began: float = 0.0

    def __enter__(self) -> None:
        self._began = self._timeline.clock()

    def __exit__(self, *exc_info: object) -> None:
        self._timeline.add(self._stage, self._began, self._weight, **self._about)
