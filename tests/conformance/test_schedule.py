"""What is said of a request that is wrong in a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.conformance.report import Report, Verdict, run
from genlm.core import AsyncLM
from genlm.core.mock import ByteTokenizer

from .blind.at_work import GeneratorsDoNotMoveUp
from .blind.working_engine import WorkingEngine
from .faulty import OfTheMock


def on_a_schedule(engine: Any) -> Verdict:
    suite = OfTheMock(engine, effort=1.0)
    suite.shrinking = 600.0  # a busy machine is slow
    (verdict,) = run(suite, only=lambda clause: clause == "requests_on_a_schedule").verdicts
    return verdict


def test_a_sound_engine_passes() -> None:
    assert on_a_schedule(WorkingEngine).status == "passed"


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


def test_rounding_is_no_fault() -> None:
    suite = WithManyTokens(Rounding, effort=0.3)
    (verdict,) = run(suite, only=lambda clause: clause == "requests_on_a_schedule").verdicts
    assert verdict.status == "passed", verdict.detail


def test_the_request_that_is_wrong_is_named_in_a_few_lines() -> None:
    verdict = on_a_schedule(GeneratorsDoNotMoveUp)
    wrong, *story = verdict.detail.splitlines()
    assert ": request " in wrong
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
