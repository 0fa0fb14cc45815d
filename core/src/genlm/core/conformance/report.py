"""Running the suite without pytest's runner, and what came of it, clause by clause."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any, Literal

import pytest
from attrs import asdict, frozen

from genlm.core.conformance.subject import Subject
from genlm.core.conformance.suite import ConformanceSuite, clause_names

Status = Literal["passed", "skipped", "failed"]


@frozen
class Verdict:
    """What came of one clause.

    Attributes:
        clause: Its name.
        status: What came of it.
        detail: Why it was skipped, or the counterexample.
        seconds: How long it took.
    """

    clause: str
    status: Status
    detail: str
    seconds: float


@frozen
class Report:
    """What came of the suite."""

    backend: str
    model: str
    verdicts: tuple[Verdict, ...]

    @property
    def conforms(self) -> bool:
        """Whether no clause failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Verdict, ...]:
        return self._of("failed")

    @property
    def skipped(self) -> tuple[Verdict, ...]:
        return self._of("skipped")

    def _of(self, status: Status) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == status)

    def summary(self) -> str:
        """The verdict in one line."""
        failed, skipped = len(self.failed), len(self.skipped)
        counts = (
            f"{len(self.verdicts) - failed - skipped} passed, {skipped} skipped, {failed} failed"
        )
        seconds = sum(verdict.seconds for verdict in self.verdicts)
        outcome = "conforms" if self.conforms else "DOES NOT CONFORM"
        return (
            f"{self.backend} {outcome}: {len(self.verdicts)} clauses, {counts}, in {seconds:.0f} s"
        )

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {"conforms": self.conforms, "summary": self.summary(), **asdict(self)}


def run(
    suite: ConformanceSuite,
    told: Callable[[Verdict], None] = lambda verdict: None,
    only: Callable[[str], bool] = lambda clause: True,
) -> Report:
    """Run the clauses on one live model, in the order of the suite.

    Args:
        suite: An instance of a class that inherits the suite.
        told: Called with each verdict as it comes.
        only: Whether to run the clause of this name, for instance ``"row_is_normalised"``.
    """
    verdicts = []
    subject = suite.subject()
    try:
        for name in clause_names(type(suite)):
            if not only(name.removeprefix("test_")):
                continue
            verdicts.append(_verdict(suite, name, subject))
            told(verdicts[-1])
    finally:
        subject.close()
    return Report(suite.backend, str(suite.model), tuple(verdicts))


def _verdict(suite: ConformanceSuite, name: str, subject: Subject) -> Verdict:
    clause = getattr(suite, name)
    arguments = () if name == "test_no_clause_is_missing" else (subject.begin(),)
    began = time.perf_counter()
    status: Status = "passed"
    detail = ""
    try:
        clause(*arguments)
    except pytest.skip.Exception as skipped:
        status, detail = "skipped", str(skipped)
    except Exception as error:
        status, detail = "failed", counterexample(error)
    return Verdict(name.removeprefix("test_"), status, detail, time.perf_counter() - began)


def counterexample(error: BaseException) -> str:
    """What an exception says, with the example that Hypothesis has noted on it."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, BaseExceptionGroup):
        lines += [counterexample(cause) for cause in error.exceptions]
    return "".join(lines).removeprefix(f"{type(error).__module__}.").strip()
