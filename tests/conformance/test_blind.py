"""Engines that were written without sight of the suite: a sample of their faults, each against the
clause that is about it. ``nox -s mutants -- blind.`` runs the whole suite on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from genlm.conformance.report import run

from .blind import BLIND
from .faulty import OfABlindEngine

pytestmark = pytest.mark.any_version

#: Clauses that check the requests of an earlier clause, with that clause.
LOOKS_BACK = {"contract_is_kept_throughout": "batch_answers_in_order"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No logs, as for the mutants."""
    with structlog.testing.capture_logs():
        yield


@pytest.mark.parametrize("name", [*BLIND][::7])
def test_blind_fault_fails_its_clause(name: str) -> None:
    mutant = BLIND[name]
    suite = OfABlindEngine(mutant.engine, effort=1.0)
    suite.patience = 2.0 if mutant.hangs else suite.patience
    needed = {mutant.breaks, LOOKS_BACK.get(mutant.breaks)}
    report = run(suite, only=lambda clause: clause in needed)
    assert report.verdicts[-1].status == "failed", report.verdicts[-1].detail
