"""Asks the process that computes rows with transformers."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from attrs import evolve

from genlm.core.checks import describe_error
from genlm.kit.verify.contexts import Group
from genlm.kit.verify.subject import Subject, size_of
from genlm.kit.verify.transformers_rows import (
    Answer,
    Choose,
    Compute,
    Explain,
    Scale,
    Scaled,
    Source,
    Unknown,
)

#: The program is not run by ``-m``, so that classes have their usual names when they are pickled.
PROGRAM = "from genlm.kit.verify.transformers_rows import main; main()"

#: The environment variables of the program: no accelerator, no network, no progress bars.
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}


class Unanswered(Exception):
    """There are no rows to compare with. The message says why."""


class Reference:
    """transformers' own rows of a model. A context manager: the process ends with it.

    Args:
        subject: The model.
        folder: Where the model's files are.
        adapter: The folder of a LoRA adapter.

    Raises:
        Unanswered: the process cannot be started.
    """

    def __init__(self, subject: Subject, folder: Path, adapter: str | None = None) -> None:
        self._scratch = tempfile.TemporaryDirectory()
        self._source = Source(
            str(folder), dict(subject.changes), size_of(folder), self._scratch.name, adapter
        )
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        inherited = {**os.environ, **ENVIRONMENT, "PYTHONPATH": python_path()}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env=inherited,
            )
        except (OSError, TypeError) as error:  # TypeError if Python does not know its own path
            raise Unanswered(f"no Python can be started here: {describe_error(error)}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()
        self._scratch.cleanup()

    @contextmanager
    def ended_after(self, seconds: float | None) -> Iterator[None]:
        """End the process if it takes longer; ``None`` is no limit."""
        timer = threading.Timer(seconds or 0.0, self._process.kill)
        if seconds is not None:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def scaled_copy(self) -> Scaled | None:
        """A scaled copy of the model, of which the other methods give rows too; ``None`` if the
        model has no thresholds.

        Raises:
            Unanswered: none can be made.
        """
        folder = tempfile.mkdtemp(prefix="scaled-", dir=self._scratch.name)
        self._ask(Scale(self._source, folder))
        copy: Scaled | None = self._answer()
        return copy

    def begin(self, longest: int, copy: Scaled | None = None) -> None:
        """Ask for the contexts to compare, of at most so many tokens, and their rows; the process
        works on that until :meth:`chosen` is called."""
        self._ask(Choose(self._of(copy), longest))

    def chosen(self) -> Answer:
        """Raises: Unanswered: transformers cannot compute them."""
        answer: Answer = self._answer()
        return answer

    def rows(
        self, groups: Sequence[Group], dtype: str, copy: Scaled | None = None
    ) -> tuple[np.ndarray, ...]:
        """The rows as transformers computes them in another type.

        Raises:
            Unanswered: transformers cannot compute them.
        """
        self._ask(Compute(evolve(self._of(copy), dtype=dtype), tuple(groups)))
        rows: tuple[np.ndarray, ...] = self._answer()
        return rows

    def explanation(
        self, group: Group, rows: np.ndarray, allowed: float, copy: Scaled | None = None
    ) -> str | None:
        """The setting with whose default transformers computes these rows.

        Raises:
            Unanswered: transformers fails.
        """
        self._ask(Explain(self._of(copy), group.contexts, rows, allowed))
        name: str | None = self._answer()
        return name

    def _of(self, copy: Scaled | None) -> Source:
        return self._source if copy is None else copy.source

    def _ask(self, question: object) -> None:
        assert self._process.stdin is not None
        try:
            pickle.dump(question, self._process.stdin)
            self._process.stdin.flush()
        except OSError:
            raise Unanswered(self._last_words()) from None

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        try:
            answer = pickle.load(self._process.stdout)
        except EOFError:
            raise Unanswered(self._last_words()) from None
        if isinstance(answer, Unknown):
            raise Unanswered(answer.why)
        return answer

    def _last_words(self) -> str:
        """The explanation of a process that has ended."""
        self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace").strip().splitlines()
        words = said[-1] if said else f"exit code {self._process.returncode}"
        return f"the process that runs transformers has ended ({words:.300})"


def python_path() -> str:
    """The ``PYTHONPATH`` with which another process finds the modules that this one finds."""
    return os.pathsep.join(entry for entry in sys.path if entry)
