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

    Args:
        advance: Admits newcomers, makes one step, returns what it finished. If it raises, nothing
            is in flight any more.
    """

    def __init__(self, advance: Callable[[Sequence[R]], Iterable[tuple[R, A | Exception]]]) -> None:
        self._advance = advance
        self._in_flight: dict[R, None] = {}
        self._failure: Exception | None = None  # the last one

    def step(self, newcomers: Sequence[R]) -> Outcomes[R, A]:
        self._in_flight.update(dict.fromkeys(newcomers))
        try:
            return self._finished(self._advance(newcomers))
        except (EngineDeadError, PluginError):
            raise
        except Exception as error:
            self._failure = error
            suspects, self._in_flight = list(self._in_flight), {}
            if len(suspects) == 1:
                return [(suspects[0], error)]
            return [outcome for suspect in suspects for outcome in self._alone(suspect)]

    def _finished(self, answers: Iterable[tuple[R, A | Exception]]) -> Outcomes[R, A]:
        answers = list(answers)
        for request, _ in answers:
            if request not in self._in_flight:
                raise PluginError(
                    f"genlm_step answered {request!r}, which is not in flight; answer every query "
                    "once, and none admitted "
                    f"before genlm_step, or a wrapper around it, raised{self._when_it_raised()}"
                ) from self._failure
            del self._in_flight[request]
        return answers

    def _when_it_raised(self) -> str:
        return (
            ""
            if self._failure is None
            else f" (it did: {type(self._failure).__name__}: {self._failure})"
        )

    def _alone(self, request: R) -> Outcomes[R, A]:
        answers = self.step([request])
        while not answers:
            answers = self.step([])
        return answers
