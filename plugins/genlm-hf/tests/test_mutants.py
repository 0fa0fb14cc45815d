"""The conformance suite bites on a real model: a faulty engine fails the clause for its fault.

The mutants of the mock are in the core's tests. The whole suite on every mutant is
``nox -s mutants``.
"""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance.report import run
from genlm.hf.engine import HFEngine
from tests.conformance.faulty import OfARealModel
from tests.conformance.mutants.of_a_real_model import MUTANTS

pytestmark = pytest.mark.any_version

pytest.importorskip("peft", reason="adapters are made with the package peft")


def verdict(engine: Any, clause: str) -> Any:
    """The outcome of a clause."""
    (found,) = run(OfARealModel(engine, effort=1.0), only=lambda name: name == clause).verdicts
    return found


@pytest.mark.parametrize("name", MUTANTS)
def test_a_faulty_model_fails_its_clause(name: str) -> None:
    found = verdict(MUTANTS[name].engine, MUTANTS[name].breaks)
    assert found.status == "failed", found.detail
    # A mutant whose engine cannot answer has died; it was not caught.
    assert "EngineError" not in found.detail


def test_the_model_without_fault_passes_the_clauses() -> None:
    clauses = {one.breaks for one in MUTANTS.values()}
    found = run(OfARealModel(HFEngine, effort=1.0), only=clauses.__contains__).verdicts
    assert {one.clause for one in found} == clauses
    for one in found:
        assert one.status == "passed", one.detail


def test_a_wrong_copy_is_named() -> None:
    """If genlm-kit's planner moves the state, the report of a wrong row includes the planner's last
    commands."""
    told = verdict(MUTANTS["ForksInTurn"].engine, "large_batch").detail
    assert "the last commands of genlm.kit.kv's planners" in told
    assert "\n    Fork: " in told
