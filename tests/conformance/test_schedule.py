"""Messages about a request that gets a wrong answer in a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from genlm.conformance import Violation
from genlm.conformance.report import Report, Verdict
from genlm.core import AsyncLM
from genlm.core.mock import ByteTokenizer

from .faulty import OfTheMock, verdict_on
from .mutants.contention import GeneratorsDoNotMoveUp
from .mutants.working_engine import WorkingEngine

pytestmark = pytest.mark.any_version


def on_a_schedule(suite: OfTheMock) -> Verdict:
    suite.shrinking = 600.0  # A busy machine is slow.
    return verdict_on(suite, "requests_on_a_schedule")


class ManyTokens(ByteTokenizer):
    """As many tokens as a real model has."""

    def __len__(self) -> int:
        return 20_000

    def token_bytes(self) -> Sequence[bytes]:
        further = range(258, len(self))
        return [*super().token_bytes(), *(b"\x00" + i.to_bytes(2, "big") for i in further)]


class Rounding(WorkingEngine):
    """Its rows differ by the last digits with what else is in the batch."""

    def row_at(self, job: Any, length: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(len(self.batch))
        row = super().row_at(job, length)
        return (row + 1e-5 * torch.randn(len(row), generator=noise)).log_softmax(-1)


class WithManyTokens(OfTheMock):
    adapters = {}  # noqa: RUF012

    def load(self, **core: Any) -> AsyncLM:
        return AsyncLM(lambda: self.engine(ManyTokens(), max_context=1024), backend="mock", **core)


def test_rounding_passes_the_schedules() -> None:
    verdict = on_a_schedule(WithManyTokens(Rounding, effort=0.3))
    assert verdict.status == "passed", verdict.detail


class Planted(OfTheMock):
    """A suite that a program can make by its name."""

    def __init__(self) -> None:
        super().__init__(GeneratorsDoNotMoveUp, effort=1.0)


def test_wrong_request_is_named_and_reproduced_by_a_program() -> None:
    planted = Planted()
    planted.effort = 0.5  # The requests are other ones than at effort 1.
    wrong, *story = on_a_schedule(planted).detail.splitlines()
    assert ": request " in wrong
    assert "it draws [" in wrong
    assert "alone it draws [" in wrong
    asked = [line for line in story if line.startswith("  call ")]
    assert 1 <= len(asked) <= 3
    begin = 1 + story.index("  A program that shows it alone:")
    lines = [line[4:] for line in story[begin:] if line.startswith("    ")]
    program = lines[: 1 + [line.startswith("show(") for line in lines].index(True)]
    assert len(program) <= 10
    assert "suite.effort = 0.5" in program
    with pytest.raises(Violation, match="alone it draws"):
        exec("\n".join(program), {})


class ByName(WorkingEngine):
    """The first adapter of a name stays."""

    def job_of(self, request: Any) -> Any:
        job = super().job_of(request)
        if job.adapter is not None and job.adapter.name == "moving":
            job.adapter = None
        return job


def test_rebound_adapter_is_named_once_in_a_message() -> None:
    wrong = on_a_schedule(OfTheMock(ByName, effort=1.0)).detail.splitlines()[0]
    assert "with adapter 'moving' (bound to 'a' then)" in wrong
    assert wrong.count("'a'") == 1


def test_clause_on_one_fact_is_read_first() -> None:
    def failed(clause: str, violation: bool) -> Verdict:
        return Verdict(clause, "failed", "...", 0.0, violation=violation)

    verdicts = (
        failed("cancelled_requests_leave_nothing", violation=True),
        failed("requests_on_a_schedule", violation=True),  # Its example is simpler.
        failed("row_is_normalised", violation=False),
        failed("many_adapters", violation=True),
    )
    for some, expected in ((verdicts, "many_adapters"), (verdicts[:3], "requests_on_a_schedule")):
        first = Report("any", "any", some).first
        assert first is not None
        assert first.clause == expected
