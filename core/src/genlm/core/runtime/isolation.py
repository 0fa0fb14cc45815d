"""Failure isolation: when a batch raises, only the request that causes it gets the error."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from genlm.core.errors import EngineDeadError

R = TypeVar("R", bound=Hashable)
A = TypeVar("A")

Answers = list[tuple[R, A | Exception]]


def evaluate_isolated(
    evaluate: Callable[[Sequence[R]], Sequence[A]], requests: Sequence[R]
) -> Answers[R, A]:
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
