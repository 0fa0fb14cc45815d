"""Functions of rows that run where the rows are, once a step, for all callers of that step."""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from genlm.core.checks import safe_repr
from genlm.core.copies import is_part
from genlm.core.drawer import CPU_CHUNK_NUMBERS, on_cpu
from genlm.core.errors import InvalidInputError
from genlm.core.hook_calls import FATAL, attributed
from genlm.core.runtime.combiners import JointCombiner
from genlm.core.runtime.frames import let_go

if TYPE_CHECKING:
    import torch

R = TypeVar("R")

#: The most numbers in the matrix of one call on an accelerator. Each call waits for the device. As
#: float32, these are 256 MiB, or 1,365 rows of 49,152 tokens.
NUMBERS_PER_CALL = 1 << 26

#: The types of results in which tensors are searched.
CONTAINERS = (tuple, list, dict)


class together(Generic[R]):
    """Turn a function of rows into one that makes the argument ``then`` of each caller.

    The function runs on the engine thread, on the device where the rows are. Callers whose rows
    come from one step share one call. So a program waits for a GPU once for each step, and no
    caller gets its own copy of a row. A large step takes several calls: on a CPU each call gets as
    many rows as its cache holds, on an accelerator as many as take 256 MiB.

    The result for a caller must depend on that caller's row and arguments alone. If a call raises,
    the function is called again for fewer callers at a time, until it raises for a single one, who
    gets the exception. So one caller's failure does not reach the others, and calls that need too
    much memory are split.

    The model waits while the function runs, so the function must not block. It may ask other
    models; its own model raises a :class:`~genlm.core.errors.ReentrancyError`. ``SystemExit`` and
    ``KeyboardInterrupt`` end the model, as from a hook: all callers get an
    :class:`~genlm.core.errors.EngineDeadError`.

    Args:
        function: ``f(rows, first_arguments, second_arguments, ...)``. ``rows`` is a matrix
            ``[k, len(lm.byte_vocab)]`` of float32 log-probabilities, a row for each of ``k``
            callers; the function may write into it. Each further argument is a list of length
            ``k``: the values that the callers gave for it. The function returns ``k`` results: a
            list, or a tensor with ``k`` rows. If a result is an exception, that caller raises it. A
            result that is a view of a larger tensor is copied, also inside a tuple, list or dict,
            so that it keeps no other result and no row in memory.

    Raises:
        InvalidInputError: ``function`` is not a function, or it is a coroutine function.

    Examples:
        >>> import asyncio
        >>> from genlm.core import load_model_by_name, together
        >>> @together
        ... def ranked(rows, ranks):
        ...     ordered = rows.argsort(-1, descending=True)
        ...     return ordered[range(len(rows)), ranks].tolist()
        >>> async def first_and_second(lm, ids):
        ...     asked = (lm.next_token_logprobs(ids, then=ranked(rank)) for rank in (0, 1))
        ...     return await asyncio.gather(*asked)
        >>> with load_model_by_name("mock", backend="mock") as lm:
        ...     first, second = asyncio.run(first_and_second(lm, [72]))
        ...     row = lm.next_token_logprobs_sync([72])
        >>> bool(row[first] == row.max() and row[second] < row[first])
        True
    """

    @overload
    def __init__(self: together[torch.Tensor], function: Callable[..., torch.Tensor]) -> None: ...

    @overload
    def __init__(self, function: Callable[..., Iterable[R]]) -> None: ...

    def __init__(self, function: Callable[..., Any]) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise InvalidInputError(
                "together takes a plain function of rows and of the callers' arguments; got "
                f"{safe_repr(function)}"
            )
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *given: Any) -> Then[R]:
        """Make the ``then`` of one caller.

        Args:
            *given: The caller's own value for each argument of the function after ``rows``.
        """
        return Then(self, given)

    def __repr__(self) -> str:
        return f"<together {getattr(self.function, '__qualname__', safe_repr(self.function))}>"

    def results_of(
        self, calls: Sequence[tuple[Then[R], Sequence[torch.Tensor]]]
    ) -> list[R | Exception]:
        """The result of each caller, or the exception in its place.

        For engines that apply functions of rows themselves.

        Args:
            calls: For each caller its ``then``, which must belong to this function, and a list of
                its one row.
        """
        thens, results = zip(*calls, strict=True)
        rows: Sequence[torch.Tensor] = [*chain.from_iterable(results)]  # one row each
        given: Sequence[Sequence[Any]] = [*map(attrgetter("given"), thens)]
        most = CPU_CHUNK_NUMBERS if on_cpu(rows[0].device) else NUMBERS_PER_CALL
        some = max(1, most // len(rows[0]))
        parts = (slice(begin, begin + some) for begin in range(0, len(rows), some))
        return [*chain.from_iterable(self._isolated(rows[part], given[part]) for part in parts)]

    def _isolated(
        self, rows: Sequence[torch.Tensor], given: Sequence[Sequence[Any]]
    ) -> list[R | Exception]:
        """The results of one call. If it raises, the callers are halved and tried again, down to
        single callers, which get the exception."""
        import torch

        try:
            return self._called(torch.stack([*rows]), given)
        except FATAL:
            raise
        except BaseException as error:  # a panic of a library in Rust is no Exception
            if len(rows) == 1:
                let_go(error)  # the frames of its calls hold rows
                return [error if isinstance(error, Exception) else attributed(repr(self), error)]
        middle = len(rows) // 2
        return self._isolated(rows[:middle], given[:middle]) + self._isolated(
            rows[middle:], given[middle:]
        )

    def _called(self, rows: torch.Tensor, given: Sequence[Sequence[Any]]) -> list[R | Exception]:
        columns = map(list, zip(*given, strict=True))
        returned: Any = self.function(rows, *columns)
        if not isinstance(returned, Iterable) or getattr(returned, "ndim", 1) == 0:
            number, results = safe_repr(returned), []
        else:
            results = [*returned]
            number = f"{len(results)} results"
        if len(results) != len(rows):
            # This is not tried again: for a single row, a function that returns one result would
            # seem right.
            wrong = f"{self!r} returned {number} for {len(rows)} rows; return one each"
            return [InvalidInputError(wrong) for _ in rows]
        return own(results)


class Then(JointCombiner[R]):
    """A function of rows with one caller's arguments, made by calling a :class:`together`."""

    __slots__ = ("function", "given", "together")

    def __init__(self, function: together[R], given: Sequence[Any]) -> None:
        self.function, self.together, self.given = function, function.results_of, given


#: The functions for the rows of several contexts: one function with its arguments for all contexts,
#: or one for each.
Thens = Then[R] | Iterable[Then[R]]


def each_of(then: Thens[R], n: int) -> Sequence[Then[R]]:
    """The function for each of ``n`` rows.

    Raises:
        InvalidInputError: there is another number of functions, or one was not made by
            :class:`together`.
    """
    if isinstance(then, Then):
        return [then] * n
    if not isinstance(then, Iterable):
        return [made_by_together(then)] * n
    thens = [made_by_together(each) for each in then]
    if len(thens) != n:
        raise InvalidInputError(
            f"then has {len(thens)} elements for {n} contexts; give one for each context, such as "
            "map(draw, uniforms), or a single one for all contexts"
        )
    return thens


def made_by_together(then: Any) -> Then[Any]:
    """The function of one row, if it is one.

    Raises:
        InvalidInputError: it was not made by :class:`together`.
    """
    if isinstance(then, Then):
        return then
    remedy = (
        "call it with the caller's arguments, as in then=draw(uniform, allowed)"
        if isinstance(then, together)
        else "mark a function with @together, and call it with the caller's arguments"
    )
    raise InvalidInputError(
        f"then must be a function of rows with one caller's arguments; got {safe_repr(then)}: "
        f"{remedy}"
    )


def results_of(thens: Sequence[Then[Any]], rows: Sequence[torch.Tensor]) -> list[Any]:
    """Apply functions to rows, for engines that do this themselves. Returns the results, with
    exceptions in the places of failed ones.

    Args:
        thens: A function of each row, with its caller's arguments. Those with the same function
            share its calls.
        rows: As many rows, all on one device.
    """
    alike = defaultdict[together[Any], list[int]](list)
    for at, then in enumerate(thens):
        alike[then.function].append(at)
    made: dict[int, Any] = {}
    for function, places in alike.items():
        calls = [(thens[at], (rows[at],)) for at in places]
        made.update(zip(places, function.results_of(calls), strict=True))
    return [made[at] for at in range(len(rows))]


def own(results: list[Any]) -> list[Any]:
    """The results, with copies of the tensors in them that keep more memory alive than theirs."""
    import torch

    left = results
    # Types are compared first, so that tuples of plain numbers, the most frequent case, cost almost
    # nothing.
    while left:
        kinds = {*map(type, left)}
        if any(issubclass(kind, torch.Tensor) for kind in kinds):
            return [*map(_own, results)]
        if not any(issubclass(kind, CONTAINERS) for kind in kinds):
            break
        left = [*chain.from_iterable(map(_parts, left))]
    return results


def _parts(result: Any) -> Iterable[Any]:
    if isinstance(result, dict):
        return result.values()
    return result if isinstance(result, CONTAINERS) else ()


def _own(result: Any) -> Any:
    import torch

    if isinstance(result, torch.Tensor):
        return result.clone() if is_part(result) else result
    if isinstance(result, dict):
        return {key: _own(value) for key, value in result.items()}
    if isinstance(result, tuple) and hasattr(result, "_fields"):  # a named tuple
        return type(result)(*map(_own, result))
    return type(result)(map(_own, result)) if isinstance(result, CONTAINERS) else result
