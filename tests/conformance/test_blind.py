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


@pytest.mark.parametrize(
    ("name", "clause", "said"),
    [
        ("EqualDrawsAreOne", "first_and_last_token_stop", "one draw answers all requests"),
        ("LastTokenNeverStops", "several_stop_tokens", "temperature=1.5, stop_token_ids=["),
        ("ReadsAdaptersAgain", "adapter_that_fails_to_load", "there-is-no-such-adapter"),
    ],
)
def test_failure_names_the_guilty(name: str, clause: str, said: str) -> None:
    suite = OfABlindEngine(BLIND[name].engine, effort=0.1)
    (verdict,) = run(suite, only=lambda other: other == clause).verdicts
    assert verdict.status == "failed"
    assert said in verdict.detail
