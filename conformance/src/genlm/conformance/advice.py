"""Advice for an author on a clause that fails: its likeliest cause, which other clauses say more,
and by which capability it can be excused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Concatenate

import pytest
from attrs import frozen

from genlm.conformance.compare import Violation, origin, raised
from genlm.core.errors import GenlmError, InvalidOptionError

#: The capabilities from which an engine may be excused, by the attribute ``excused`` of a suite.
#: Rows and state are not among them: an engine whose numbers are wrong serves nobody.
CAPABILITIES = {
    "adapters in flight": "adapters that are rebound and removed while requests are in flight",
    "cancelling": "requests that are dropped while they are in flight",
    "closing": "a model that is closed while it works, and what it leaves",
    "death": "processes of the engine that are killed",
    "errors": "an engine that goes on after an error in the middle of its work",
    "extremes": "draws with tiny and large temperatures, and hundreds of stop tokens",
    "fairness": "short requests beside long ones, and beside crowds",
    "long contexts": "contexts up to max_context",
    "memory": "what is left of requests and adapters that are gone",
    "pins": "many pinned prompts, and prompts that are pinned again",
    "process": "settings and random generators of the program's process",
    "seeds": "draws that a seed fixes",
    "wake": "genlm_wake in the middle of a step",
    "weights": "weights that are changed in place",
}


def check_excuses(excused: Mapping[str, str]) -> None:
    """Raises: InvalidOptionError: one is no capability, or has no reason."""
    for name, reason in excused.items():
        if name not in CAPABILITIES:
            known = ", ".join(map(repr, CAPABILITIES))
            raise InvalidOptionError(
                f"there is no capability {name!r} to excuse an engine from; there are {known}"
            )
        if not reason:
            raise InvalidOptionError(f"say why the engine is excused from {name!r}")


@frozen
class Advice:
    """The advice that a failure of a clause ends with.

    Attributes:
        cause: The likeliest cause of a failure.
        others: Clauses that say more, where they fail too.
        capability: One of :data:`CAPABILITIES`; ``None`` where the clause cannot be excused.
    """

    cause: str
    others: tuple[str, ...] = ()
    capability: str | None = None

    def __str__(self) -> str:
        also = f"\nSee also: {', '.join(self.others)}." if self.others else ""
        return f"Likeliest cause: {self.cause}.{also}"


def advise(
    cause: str, *others: str, capability: str | None = None
) -> Callable[[Callable[Concatenate[Any, Any, ...], None]], Callable[..., None]]:
    """Decorate a clause with the advice for its failures, and with the capability that excuses an
    engine from it."""
    advice = Advice(cause, others, capability)
    assert capability is None or capability in CAPABILITIES

    def decorate(clause: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(clause)
        def advised(self: Any, live: Any) -> None:
            if capability is not None and capability in self.excused:
                pytest.skip(f"excused from {capability!r}: {self.excused[capability]}")
            try:
                clause(self, live)
            except Exception as error:
                found = _as_violation(error, live.told())
                found.add_note(str(advice))
                raise found from (None if found is error else error)

        advised.advice = advice  # type: ignore[attr-defined]
        return advised

    return decorate


def _as_violation(error: Exception, before: str) -> Exception:
    """An exception of the engine as the violation that it is: clauses make valid requests only.
    Other exceptions are left as they are.

    Args:
        error: The exception.
        before: What happened before it, as the end of a message.
    """
    if isinstance(error, Violation) or not (isinstance(error, GenlmError) or origin(error)):
        return error
    found = raised(error, "a valid call", before)
    found.__notes__ = getattr(error, "__notes__", [])
    return found
