"""Checks of users' input. Every message names the option, what is accepted, and the value."""

from __future__ import annotations

import inspect
import math
import operator
import traceback
from collections.abc import Callable
from typing import Any, Literal, overload

from genlm.core.errors import InvalidOptionError

#: The most characters of a value that a message shows.
MAX_REPR_CHARACTERS = 200


def safe_repr(value: object) -> str:
    """``repr(value)`` for a message: never an exception, and never pages of text.

    Python itself writes no integer of more than 4,300 digits, and the ``repr`` of a
    user's own class may raise.
    """
    if type(value) is int and value.bit_length() > 8 * MAX_REPR_CHARACTERS:
        return f"an integer of {value.bit_length()} bits"
    try:
        text = repr(value)
    except Exception as error:
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
    return text if len(text) <= MAX_REPR_CHARACTERS else f"{text[:MAX_REPR_CHARACTERS]}..."


def describe_error(error: BaseException) -> str:
    """The kind and the message of an error, for another message; never raises. For an error without
    a message, such as a bare ``assert``, the place where it was raised."""
    try:
        text = str(error)
        if not text and error.__traceback__ is not None:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            text = f"raised in {frame.f_code.co_qualname}"
    except Exception as another:
        text = f"<its text cannot be shown: {type(another).__name__}>"
    return f"{type(error).__name__}: {text}"


@overload
def integer(name: str, value: Any, least: int, optional: Literal[False] = False) -> int: ...


@overload
def integer(name: str, value: Any, least: int, optional: Literal[True]) -> int | None: ...


def integer(name: str, value: Any, least: int, optional: bool = False) -> int | None:
    """An integer option as a plain ``int``.

    Args:
        name: The option's name, for the message.
        value: What the user gave: an int, or what converts to one without loss (a NumPy integer).
        least: The least value that is accepted.
        optional: Whether ``None`` is accepted.

    Raises:
        InvalidOptionError: the value is not such an integer.
    """
    if value is None and optional:
        return None
    try:
        if not isinstance(value, bool) and (number := operator.index(value)) >= least:
            return number
    except TypeError:
        pass
    raise InvalidOptionError(
        f"{name} must be an integer of at least {least}{', or None' if optional else ''}; "
        f"got {safe_repr(value)}"
    )


def number(name: str, value: Any, accepted: str, accepts: Callable[[float], bool]) -> float:
    """A finite number as a ``float``.

    Args:
        name: The option's name, for the message.
        value: What the user gave: anything that ``float`` takes, except text.
        accepted: The range in words, for the message: ``"of at least 0"``.
        accepts: Whether a number is in that range.

    Raises:
        InvalidOptionError: the value is not such a number.
    """
    try:
        if not isinstance(value, bool | str | bytes | bytearray):
            converted = float(value)
            if math.isfinite(converted) and accepts(converted):
                return converted
    except (TypeError, ValueError, OverflowError):
        pass
    raise InvalidOptionError(f"{name} must be a finite number {accepted}; got {safe_repr(value)}")


def flag(name: str, value: Any) -> bool | None:
    """``True``, ``False`` or ``None``, as it is.

    Raises:
        InvalidOptionError: the value is something else.
    """
    if value is None or isinstance(value, bool):
        return value
    raise InvalidOptionError(f"{name} must be True, False or None; got {safe_repr(value)}")


def unawaited(value: object) -> str:
    """For the end of a message: the remedy, where a value is not there yet."""
    return "; write `await` before what gives it" if inspect.isawaitable(value) else ""
