"""Failure isolation: when a batch raises, only the request that causes it gets the error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from genlm.core.errors import EngineDeadError, PluginError

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")

Outcomes = list[tuple[R, A | Exception]]


def evaluate_isolated(
    evaluate: Callable[[Sequence[R]], Sequence[A]], requests: Sequence[R]
) -> Outcomes[R, A]:
    """Evaluate a batch; if it raises, evaluate its halves, down to the requests that fail alone.

    A batch of ``n`` with one culprit costs about ``2 * log2(n)`` further calls, most of them small.
    """
    if not requests:
        return []
    try:
        return list(zip(requests, evaluate(requests), strict=True))
    except EngineDeadError:
        raise
    except Exception as error:
        if len(requests) == 1:
            return [(requests[0], error)]
    middle = len(requests) // 2
    return evaluate_isolated(evaluate, requests[:middle]) + evaluate_isolated(
        evaluate, requests[middle:]
    )


class IsolatedSteps(Generic[R, A]):
    """The same promise for an engine that is advanced step by step.

    When a step raises, everything that was in flight is suspect. The suspects are admitted again,
    each alone, so that only the one that fails gets the error. What is asked meanwhile waits until
    the last suspect is answered.

    Args:
        advance: Admits newcomers, drops requests, makes one step, returns what it finished. If it
            raises, nothing is in flight any more.
    """

    def __init__(
        self,
        advance: Callable[[Sequence[R], Sequence[R]], Iterable[tuple[R, A | Exception]]],
    ) -> None:
        self._advance = advance
        self._in_flight: dict[R, None] = {}
        self._suspects: dict[R, None] = {}  # one of them may be in flight, alone
        self._held: dict[R, None] = {}  # newcomers that wait for the last suspect
        self._failure: Exception | None = None  # the last one

    @property
    def in_flight(self) -> int:
        """How many requests the engine has."""
        return len(self._in_flight)

    def step(self, newcomers: Sequence[R], dropped: Sequence[R] = ()) -> Outcomes[R, A]:
        """Make one step.

        Raises:
            EngineDeadError: the engine cannot continue.
            PluginError: it answered what is not in flight.
        """
        dropped = [request for request in dropped if self._forget(request)]
        self._held.update(dict.fromkeys(newcomers))
        admitted = self._admit()
        if not (self._in_flight or dropped):
            return []
        try:
            return self._finished(self._advance(admitted, dropped), dropped)
        except (EngineDeadError, PluginError):
            raise
        except Exception as error:
            return self._failed(error)

    def _forget(self, request: R) -> bool:
        """A request is dropped. ``True`` if the engine has it."""
        self._suspects.pop(request, None)
        self._held.pop(request, None)
        if request not in self._in_flight:
            return False
        del self._in_flight[request]
        return True

    def _admit(self) -> list[R]:
        """The requests that enter flight now."""
        if self._suspects:
            admitted = [] if self._in_flight else [next(iter(self._suspects))]
        else:
            admitted, self._held = list(self._held), {}
        self._in_flight.update(dict.fromkeys(admitted))
        return admitted

    def _finished(
        self, answers: Iterable[tuple[R, A | Exception]], dropped: Sequence[R]
    ) -> Outcomes[R, A]:
        finished: Outcomes[R, A] = []
        for request, answer in answers:
            if request in self._in_flight:
                del self._in_flight[request]
                self._suspects.pop(request, None)
                finished.append((request, answer))
            elif request not in dropped:  # it may have been finished before it could be dropped
                raise PluginError(
                    f"genlm_step answered {request!r}, which is not in flight; answer every "
                    "request once, and none admitted "
                    f"before genlm_step, or a wrapper around it, raised{self._when_it_raised()}"
                ) from self._failure
        return finished

    def _when_it_raised(self) -> str:
        return (
            ""
            if self._failure is None
            else f" (it did: {type(self._failure).__name__}: {self._failure})"
        )

    def _failed(self, error: Exception) -> Outcomes[R, A]:
        self._failure = error
        lost, self._in_flight = self._in_flight, {}
        if len(lost) == 1:  # it was alone
            (request,) = lost
            self._suspects.pop(request, None)
            return [(request, error)]
        self._suspects |= lost
        return []
