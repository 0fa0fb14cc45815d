"""The scaled copy of a model, as its engine serves it with the model's options: for thresholds
beyond which no context is short enough to compute, and for what hardly shows beyond them, such as
one token more in a long window."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile

from attrs import frozen

from genlm.core.checks import describe_error
from genlm.kit.verify.contexts import Group
from genlm.kit.verify.engine_rows import Rows, Serve
from genlm.kit.verify.reference import Reference, Unanswered, python_path
from genlm.kit.verify.subject import Subject
from genlm.kit.verify.transformers_rows import Answer, Scaled, Unknown, nearer

PROGRAM = "from genlm.kit.verify.engine_rows import main; main()"

#: The longest context of a scaled copy, in tokens.
MAX_CONTEXT_TOKENS = 64

#: The most seconds in which an engine must load a scaled copy.
LOAD_SECONDS = 600.0


@frozen
class ServedCopy:
    """A scaled copy, and its rows.

    Attributes:
        copy: The copy.
        answer: transformers' rows.
        rows: The engine's.
    """

    copy: Scaled
    answer: Answer
    rows: Rows


def serve_copy(subject: Subject, reference: Reference) -> ServedCopy | None:
    """Rows of a scaled copy by the subject's engine; ``None`` if the model has no thresholds.

    Raises:
        Unanswered: there are none; says why.
    """
    copy = reference.scaled_copy()
    if copy is None:
        return None
    reference.begin(MAX_CONTEXT_TOKENS, copy)
    answer = reference.chosen()
    return ServedCopy(copy, answer, _rows(subject, copy, answer.chosen.groups))


def _rows(subject: Subject, copy: Scaled, groups: tuple[Group, ...]) -> Rows:
    contexts = tuple(context for group in groups for context in group.contexts)
    options = nearer(subject.options, copy.thresholds)
    try:
        question = pickle.dumps(Serve(subject.backend, copy.source.folder, options, contexts))
    except Exception as error:  # a class may raise any exception
        raise Unanswered(
            f"an option cannot be sent to a process ({describe_error(error)})"
        ) from error
    with tempfile.TemporaryFile() as log:
        try:
            ended = subprocess.run(
                [sys.executable, "-c", PROGRAM],
                input=question,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, "PYTHONPATH": python_path()},
                timeout=LOAD_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Unanswered(f"its load takes more than {LOAD_SECONDS:.0f} seconds") from error
    try:
        answer: Rows | Unknown = pickle.loads(ended.stdout)
    except (EOFError, pickle.UnpicklingError) as error:
        raise Unanswered(f"the engine's process ended with code {ended.returncode}") from error
    if isinstance(answer, Unknown):
        raise Unanswered(f"{subject.engine} does not serve it ({answer.why:.300})")
    return answer
