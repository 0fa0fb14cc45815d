"""The process in which an engine computes rows of a scaled copy.

:mod:`genlm.kit.verify.copies` starts it. It is a process of its own, because some engines serve one
model a process, and an engine that fails on so small a model must not end the program.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from genlm.core.checks import describe_error
from genlm.core.plugins import find_backend
from genlm.kit.verify.rows import row_of
from genlm.kit.verify.transformers_rows import Unknown


@frozen
class Serve:
    """The question for the rows that an engine computes.

    Attributes:
        backend: The backend's name.
        folder: The model.
        options: The options of the backend.
        contexts: Token ids.
    """

    backend: str
    folder: str
    options: Mapping[str, Any]
    contexts: tuple[tuple[int, ...], ...]


@frozen
class Rows:
    """The answer.

    Attributes:
        of: The row of each context, float32 log-probabilities; without contexts that are too long.
        max_context: The longest context that the engine takes.
        dtype: The type in which the engine computes; ``None`` is the checkpoint's.
    """

    of: Mapping[tuple[int, ...], np.ndarray]
    max_context: int | None
    dtype: str | None


def main() -> None:
    """Read one pickled question from the standard input, and write the answer to the standard
    output."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of engines must not get into the answer
    question: Serve = pickle.load(sys.stdin.buffer)
    try:
        answer: Rows | Unknown = rows(question)
    except Exception as error:  # an engine may raise any exception
        answer = Unknown(describe_error(error))
    pickle.dump(answer, answers)
    answers.close()


def rows(question: Serve) -> Rows:
    """Raises: Exception: what the engine raises."""
    engine: Any = find_backend(question.backend).load(question.folder, question.options, False)
    longest = getattr(engine, "max_context", None)
    taken = [each for each in question.contexts if longest is None or len(each) <= longest]
    found = {each: row_of(engine, each).float().cpu().numpy() for each in taken}
    getattr(engine, "genlm_close", lambda: None)()
    return Rows(found, longest, getattr(engine, "dtype", None))
