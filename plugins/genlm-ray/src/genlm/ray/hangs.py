"""Detects functions of rows that do not return: which function runs, for which callers, and for how
long."""

from __future__ import annotations

from functools import wraps
from typing import Any

from attrs import define, field, frozen

from genlm.core.together import together

#: Seconds between two checks of the running call.
LOOK_SECONDS = 1.0


@frozen(eq=False)
class Caller:
    """A caller that waits for the result of a function of a row.

    Attributes:
        patience: Seconds that one call of the function may take.
    """

    patience: float


@frozen(eq=False)
class Running:
    """A call of a function, on the engine thread.

    Attributes:
        name: The name of the function.
        callers: The callers whose rows it was given.
    """

    name: str
    callers: frozenset[Caller]


@define(eq=False)
class Hangs:
    """Checks the running call, from another thread than the engine's."""

    _running: Running | None = field(default=None, init=False)
    _seen: Running | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)  # the call that the last check saw
    _looked: float = field(default=0.0, init=False)  # when that call was first seen

    def watched(self, function: together[Any]) -> together[Any]:
        """The function, wrapped so that it reports when it runs and for which callers. Each caller
        is its first argument."""

        @wraps(function.function)
        def run(rows: Any, callers: list[Caller], *given: list[Any]) -> Any:
            self._running = Running(repr(function), frozenset(callers))
            try:
                return [*function.function(rows, *given)]
            finally:
                self._running = None

        return together(run)

    def look(self, now: float) -> Running | None:
        """The running call, if it has taken too long for one of its callers. If much more time has
        passed than between two checks, the process was stopped; that time does not count.
        """
        passed, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now
        running = self._running
        self._seconds = self._seconds + passed if running is self._seen else 0.0
        self._seen = running
        if running is None or self._seconds < min(one.patience for one in running.callers):
            return None
        return running
