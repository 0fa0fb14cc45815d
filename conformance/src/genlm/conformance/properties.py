"""Properties: what must hold for every example. Hypothesis makes the examples, and simplifies one
that fails."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Flaky
from hypothesis.strategies import SearchStrategy

from genlm.conformance.compare import Violation
from genlm.conformance.subject import Subject


def for_all(
    live: Subject, examples: int = 20, least: int = 2, **strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], None]:
    """Decorate a property, which is checked at once: of examples that are the same in every run,
    each in a clean state.

    There are ``examples`` times the effort of them, and at least ``least``. (Not at import, as with
    Hypothesis: the strategies depend on the model.)
    """

    def check_all(holds: Callable[..., None]) -> None:
        failed: list[dict[str, Any]] = []
        shrink_until = math.inf
        hangs = live.hangs

        @settings(
            max_examples=max(least, round(examples * live.effort)),
            database=None,
            deadline=None,
            phases=(Phase.generate, Phase.shrink) if live.shrinking else (Phase.generate,),
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        )
        @given(**strategies)
        @functools.wraps(holds)
        def example(**drawn: Any) -> None:
            nonlocal shrink_until
            if time.monotonic() > shrink_until and drawn not in failed:
                return  # The time for shrinking is over, and the example is simple enough.
            live.model.reset()
            try:
                holds(**drawn)
            except Exception:
                shrinking = 0.0 if live.was_late or live.hangs > hangs else live.shrinking
                shrink_until = min(shrink_until, time.monotonic() + shrinking)
                failed.append(drawn)
                raise

        explained(hypothesis.seed(live.seed)(example))

    return check_all


def explained(test: Callable[[], None]) -> None:
    """Run a test of Hypothesis. A failure is the violation itself, with the example, also where the
    same example does not always fail."""
    try:
        test()
    except BaseException as error:
        # If the example did not fail again, Hypothesis notes the whole traceback of the first time.
        notes = [
            compact(note)
            for note in getattr(error, "__notes__", ())
            if not note.startswith("Failed to reproduce exception")
        ]
        found = error
        if isinstance(error, Flaky):
            found = violation_in(error) or error
            notes.append("The same example does not fail every time.")
        found.__notes__ = notes
        raise found from (None if found is error else error)


def violation_in(error: BaseException) -> Violation | None:
    """The violation that an error is, that it holds, or that it came from."""
    if isinstance(error, Violation):
        return error
    held = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    causes = [each for each in (*held, error.__cause__, error.__context__) if each is not None]
    return next(filter(None, map(violation_in, causes)), None)


def compact(note: str) -> str:
    """Hypothesis' note of an example, with token ids side by side instead of one a line."""
    return re.sub(r"(?<=\d,)\s*\n\s*(?=-?\d)", " ", note)
