"""Functions of rows that do not return: which one runs, for whom, and for how long."""

from __future__ import annotations

from functools import wraps
from typing import Any

from attrs import define, field, frozen

from genlm.core.together import together

#: How long to wait between two looks at what runs.
LOOK_SECONDS = 1.0


@frozen(eq=False)
class Caller:
    """One who waits for what a function makes of a row.

    Attributes:
        patience: Seconds that one call of the function may take.
    """

    patience: float


@frozen(eq=False)
class Running:
    """A call of a function, on the engine thread.

    Attributes:
        name: The function's.
        callers: Whose rows it has.
    """

    name: str
    callers: frozenset[Caller]


@define(eq=False)
class Hangs:
    """Looks at the call that runs, from another thread than the engine's."""

    _running: Running | None = field(default=None, init=False)
    _seen: Running | None = field(default=None, init=False)
    _seconds: float = field(default=0.0, init=False)  # for which it was seen
    _looked: float = field(default=0.0, init=False)  # when

    def watched(self, function: together[Any]) -> together[Any]:
        """The same function, which says when it runs, and for whom: a
        caller gives itself first."""

        @wraps(function.function)
        def run(rows: Any, callers: list[Caller], *given: list[Any]) -> Any:
            self._running = Running(repr(function), frozenset(callers))
            try:
                return [*function.function(rows, *given)]
            finally:
                self._running = None

        return together(run)

    def look(self, now: float) -> Running | None:
        """The call that has taken too long for one of its callers, if there is one. Where much more
        time has passed than between two looks, this process was stopped, and that does not count.
        """
        passed, self._looked = min(now - self._looked, 2 * LOOK_SECONDS), now
        running = self._running
        self._seconds = self._seconds + passed if running is self._seen else 0.0
        self._seen = running
        if running is None or self._seconds < min(one.patience for one in running.callers):
            return None
        return running
