"""Combiners: they make the result of a call from the results of its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from attrs import frozen

T = TypeVar("T")

#: Makes the result of one call from the results of its requests, which come in the order of the
#: requests. It runs on the engine thread. Results are shared with other callers and with the cache,
#: so it must return copies. If it raises, only its own caller gets the error.
Combiner = Callable[[Sequence[Any]], T]


class JointCombiner(Generic[T]):
    """A combiner that makes the results of many callers at once.

    Calls that end in the same step, and whose ``together`` are equal, share one call of it. Nothing
    waits for further callers. A combiner is joint if its class derives from this one. Any other
    callable is called for each caller separately.

    Attributes:
        together: Takes the combiner and the results of each call. Returns what each caller gets, in
            that order; an exception is raised by its caller alone. If it raises, there was no
            memory for all of them: then each combiner is called alone.
    """

    __slots__ = ()

    together: Callable[[Sequence[tuple[Any, Sequence[Any]]]], Sequence[Any]]

    def __call__(self, results: Sequence[Any]) -> T:
        (made,) = self.together([(self, results)])
        if isinstance(made, Exception):
            raise made
        given: T = made
        return given


@frozen
class EachCombiner(Generic[T]):
    """A combiner of a call of several requests that makes something of each result by itself, in
    the step that brings the result, and keeps no result for a later step.

    The joint combiners share calls of ``together`` with those of other callers.

    Attributes:
        each: What makes something of each result, in the order of the requests; empty if results
            stay as they are.
        keeps_errors: Whether an exception is what its request gives; otherwise the first one ends
            the call.
    """

    each: Sequence[JointCombiner[T]] = ()
    keeps_errors: bool = False

    def __call__(self, results: Sequence[T]) -> list[T]:
        """Make the caller's result."""
        return [*results]
