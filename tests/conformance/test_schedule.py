"""What is said of a request that is wrong in a schedule."""

from __future__ import annotations

from typing import Any

from genlm.core.conformance.report import Report, Verdict, run

from .bite import OfTheMock
from .blind.at_work import GeneratorsDoNotMoveUp
from .blind.working_engine import WorkingEngine


def on_a_schedule(engine: Any) -> Verdict:
    suite = OfTheMock(engine, effort=1.0)
    (verdict,) = run(suite, only=lambda clause: clause == "requests_on_a_schedule").verdicts
    return verdict


def test_a_sound_engine_passes() -> None:
    assert on_a_schedule(WorkingEngine).status == "passed"


def test_the_request_that_is_wrong_is_named_in_a_few_lines() -> None:
    verdict = on_a_schedule(GeneratorsDoNotMoveUp)
    wrong, *story = verdict.detail.splitlines()
    assert wrong.startswith("Violation: request ")
    assert "it draws [" in wrong
    assert "alone it draws [" in wrong
    asked = [line for line in story if line.startswith("  call ")]
    assert 1 <= len(asked) <= 3


def test_a_clause_that_says_what_is_wrong_is_read_first() -> None:
    def failed(clause: str, violation: bool) -> Verdict:
        return Verdict(clause, "failed", "...", 0.0, violation=violation)

    verdicts = (
        failed("requests_on_a_schedule", violation=True),
        failed("row_is_normalised", violation=False),
        failed("many_adapters", violation=True),
    )
    first = Report("any", "any", verdicts).first
    assert first is not None
    assert first.clause == "many_adapters"
