"""Failure isolation: when a batch raises, only the request that causes it gets the error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Generic, TypeVar

from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import EngineDeadError, PluginError

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")

Outcomes = list[tuple[R, A | Exception]]


def evaluate_isolated(
    evaluate: Callable[[Sequence[R]], Sequence[A]], requests: Sequence[R]
) -> Outcomes[R, A]:
    """Evaluate a batch; if it raises, evaluate its halves, down to the requests that fail alone.

    A batch of ``n`` with one failing request costs about ``2 * log2(n)`` more calls, most of them
    small.
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
    """The same promise for an engine that works in steps.

    When a step raises, everything that was in flight is suspect. The suspects are admitted again,
    each alone, so that only the one that fails gets the error. New requests wait until the last
    suspect is answered.

    Args:
        advance: Admits newcomers, drops requests, makes one step, returns what it finished. If it
            raises, nothing is in flight afterwards.
        drops: Whether the engine drops requests.
    """

    def __init__(
        self,
        advance: Callable[[Sequence[R], Sequence[R]], Iterable[tuple[R, A | Exception]]],
        drops: bool = False,
    ) -> None:
        self._advance = advance
        self._drops = drops
        self._in_flight: dict[R, None] = {}
        self._suspects: dict[R, None] = {}  # one of them may be in flight, alone
        self._held: dict[R, None] = {}  # newcomers that wait for the last suspect
        self._unwanted: dict[R, None] = {}  # in the engine, but no caller waits for them
        self._failure: BaseException | None = None  # the last one

    @property
    def in_flight(self) -> int:
        """How many requests the engine has."""
        return len(self._in_flight)

    def step(self, newcomers: Sequence[R], dropped: Sequence[R] = ()) -> Outcomes[R, A]:
        """Make one step.

        Raises:
            EngineDeadError: the engine cannot continue.
            PluginError: it answered a request that is not in flight.
        """
        for request in dropped:
            self._forget(request)
        self._held.update(dict.fromkeys(newcomers))
        admitted = self._admit()
        unwanted = list(self._unwanted)
        if not (self._in_flight or (unwanted and self._drops)):
            return []
        try:
            finished = self._finished(self._advance(admitted, unwanted if self._drops else []))
        except (EngineDeadError, PluginError):
            raise
        except Exception as error:
            self._unwanted.clear()
            return self._failed(list(self._in_flight), error)
        if self._drops:
            self._unwanted.clear()
        return finished

    def _forget(self, request: R) -> None:
        """Drop a request."""
        self._suspects.pop(request, None)
        self._held.pop(request, None)
        if request in self._in_flight:
            del self._in_flight[request]
            self._unwanted[request] = None

    def _admit(self) -> list[R]:
        """Note the requests that go in flight now; return those that the engine does not have
        yet."""
        if self._suspects:
            entering = [] if self._in_flight else [next(iter(self._suspects))]
        else:
            entering, self._held = list(self._held), {}
        self._in_flight.update(dict.fromkeys(entering))
        known = [request for request in entering if request in self._unwanted]
        for request in known:
            del self._unwanted[request]
        return [request for request in entering if request not in known] if known else entering

    def _finished(self, answers: Iterable[tuple[R, A | Exception]]) -> Outcomes[R, A]:
        finished: Outcomes[R, A] = []
        for request, answer in answers:
            if request in self._in_flight:
                del self._in_flight[request]
                self._suspects.pop(request, None)
                finished.append((request, answer))
            elif request in self._unwanted:  # finished before it could be dropped
                del self._unwanted[request]
            else:
                raise PluginError(
                    f"genlm_step answered {safe_repr(request)}, which is not in flight; answer "
                    f"every request once, and none that was admitted before it raised{self._when()}"
                ) from self._failure
        return finished

    def _when(self) -> str:
        return "" if self._failure is None else f" (it did: {describe_error(self._failure)})"

    def _failed(self, requests: Sequence[R], error: Exception) -> Outcomes[R, A]:
        """A step raised, and the engine has dropped ``requests``: one alone failed, several are
        suspects."""
        self._failure = error
        for request in requests:
            self._in_flight.pop(request, None)
            self._suspects.pop(request, None)
        if len(requests) == 1:
            return [(requests[0], error)]
        self._suspects.update(dict.fromkeys(requests))
        return []
