"""When two rows are the same, and how they differ when they are not."""

from __future__ import annotations

import math
import os
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

import genlm.core

if TYPE_CHECKING:
    import torch

#: The folders of the suite's code and of the core's.
OURS = (os.path.dirname(__file__), os.path.dirname(genlm.core.__file__))

#: The folder of the standard library.
STANDARD = os.path.dirname(os.__file__)

#: How far a probability may be from its cold one, by the type the model computes in. Measured
#: differences between batch shapes are a tenth of these.
ATOL = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 5e-2}

#: How many of the most likely tokens are compared by log-probability too.
TOP_TOKENS = 10

#: Their tolerance, in units of ``atol``.
TOP_FACTOR = 10.0

#: Tokens at least as likely as this are compared by log-probability too, in units of ``atol``, and
#: by no more than that: constrained decoding and importance weights live in the tail.
MIN_TAIL_PROBABILITY, TAIL_FACTOR, MAX_TAIL_NATS = 1e-7, 500.0, 3.0

#: Beyond it a change of the batch's shape may move a drawing point across a boundary between two
#: tokens.
ROUNDING_ATOL = 1e-3


class Violation(AssertionError):
    """A clause does not hold."""


def check(holds: bool, otherwise: str) -> None:
    """Raises: Violation: with the message ``otherwise``, unless ``holds``."""
    if not holds:
        raise Violation(otherwise)


def answered(outcome: Any, what: str, more: str = "") -> Any:
    """The answer, unless the outcome is an exception.

    Raises:
        Violation: The outcome is an exception. The messages are ``what`` and ``more``.
    """
    if isinstance(outcome, BaseException):
        told = f"{type(outcome).__name__}: {outcome}{origin(outcome)}"
        raise Violation(f"{what}: {told}{more}") from outcome
    return outcome


def raised(error: Exception, what: str, more: str = "") -> Violation:
    """The violation that a valid request for ``what`` raised an exception."""
    return Violation(f"{what} raised {type(error).__name__}: {error}{origin(error)}{more}")


def origin(error: BaseException) -> str:
    """The place in the engine's own code where an exception was raised, as the end of a message;
    empty if it was raised elsewhere."""
    # The core's exception, which names the request, comes from the engine's.
    while error.__cause__ is not None:
        error = error.__cause__
    place = _engines_own(traceback.walk_tb(error.__traceback__))
    return f" (raised by the engine's own code, in {place})" if place else ""


def standing() -> str:
    """The places in the engine's own code where threads are now, as the end of a message; empty if
    no thread is there."""
    stacks = [reversed([*traceback.walk_stack(frame)]) for frame in sys._current_frames().values()]
    places = sorted({*filter(None, map(_engines_own, stacks))})
    return f" (in the engine's own code now, in {'; in '.join(places[:3])})" if places else ""


def _engines_own(frames: Iterable[tuple[FrameType, int]]) -> str:
    """The hook, or the import, and the place in the engine's own code, of frames from the outermost
    on; empty where there is none."""
    hook, place = "", ""
    for frame, line in frames:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if file.startswith(OURS):
            hook = "the import of its module" if name == "find_backend" else hook
        elif os.path.dirname(file) != STANDARD and not file.startswith("<frozen importlib"):
            hook = name if name.startswith("genlm_") else hook
            place = f"{file}, line {line}, in {name}"
    return f"{hook}: {place}" if hook else ""


def brief(token_ids: Sequence[int]) -> str:
    """Token ids as a message shows them: all of a few, the beginning and the end of many."""
    ids = [int(token_id) for token_id in token_ids]
    if len(ids) <= 24:
        return str(ids)
    begin, end = ", ".join(map(str, ids[:8])), ", ".join(map(str, ids[-8:]))
    return f"[{begin}, ..., {end}] ({len(ids)} tokens)"


def with_adapter(adapter: str | None) -> str:
    """The part of a message on the adapter of a request."""
    return "" if adapter is None else f" with adapter {adapter!r}"


def with_options(options: Mapping[str, Any]) -> str:
    """What a message says of the options of a draw."""
    given = ", ".join(f"{name}={value}" for name, value in options.items() if value is not None)
    return f" with {given}" if given else ""


def are_identical(row: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two rows are the same to the last bit. For most rows this saves a closer look."""
    alike = row.dtype == expected.dtype and row.device == expected.device
    return alike and bool(row.equal(expected))


def deviation(row: torch.Tensor, expected: torch.Tensor) -> float:
    """The greatest difference of two rows' probabilities; 0 where they cannot be compared."""
    if row.shape != expected.shape:
        return 0.0
    away = (row.cpu().double().exp() - expected.cpu().double().exp()).abs()
    return float(away.nan_to_num(0.0).max()) if len(away) else 0.0


def difference(row: torch.Tensor, expected: torch.Tensor, atol: float) -> str | None:
    """The difference of two rows of log-probabilities beyond the tolerance; ``None`` if there is
    none.

    Probabilities may differ by ``atol``, the log-probabilities of the ``TOP_TOKENS`` most likely
    tokens by ``TOP_FACTOR * atol``, and those of all tokens that are at least as likely as
    ``MIN_TAIL_PROBABILITY`` by ``TAIL_FACTOR * atol``.
    """
    if row.shape != expected.shape:
        return f"its shape is {tuple(row.shape)}, not {tuple(expected.shape)}"
    row, expected = row.cpu().double(), expected.cpu().double()

    def at(i: int, p: torch.Tensor, q: torch.Tensor) -> str:
        return f"of token {i} is {float(p[i]):.6g} instead of {float(q[i]):.6g}"

    # Log-probabilities that are this near are within every tolerance below.
    if bool(((row - expected).abs() <= atol / 2).all()):
        return None
    impossible = (row == -math.inf) != (expected == -math.inf)
    if bool(impossible.any()):
        return f"the log-probability {at(int(impossible.nonzero()[0]), row, expected)}"
    away = (row.exp() - expected.exp()).abs()
    # The comparison is written so that nan is not within the tolerance.
    if not bool((away <= atol).all()):
        found = at(int(away.nan_to_num(float("inf")).argmax()), row.exp(), expected.exp())
        return f"the probability {found} (tolerance {atol:g})"
    top = expected.topk(min(TOP_TOKENS, len(expected))).indices
    # The difference of two -inf is nan, although both are the same.
    away = (row[top] - expected[top]).abs().where(row[top] != expected[top], 0.0)
    if not bool((away <= TOP_FACTOR * atol).all()):
        found = at(int(top[away.argmax()]), row, expected)
        return f"the log-probability {found} (tolerance {TOP_FACTOR * atol:g})"
    tolerance = min(TAIL_FACTOR * atol, MAX_TAIL_NATS)
    seen = row.maximum(expected) >= math.log(MIN_TAIL_PROBABILITY)
    away = (row - expected).abs().where(seen & (row != expected), 0.0)
    if not bool((away <= tolerance).all()):
        found = at(int(away.argmax()), row, expected)
        return f"the log-probability {found} (tolerance {tolerance:g})"
    return None
