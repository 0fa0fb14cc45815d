"""The suite bites: every clause fails on a model that breaks it, and on no model that breaks
something else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from genlm.core import AsyncLM
from genlm.core.conformance import ConformanceSuite
from genlm.core.conformance.report import run

from .installed import pretend_installed
from .mutants import MUTANTS, Mutant

#: Clauses that no engine can break: their own tests are below.
ELSEWHERE = {"import_of_plugin_imports_no_engine", "no_clause_is_missing"}


class Mutated(ConformanceSuite):
    backend = "mock"
    model = "mock"
    adapters = {"a": "first-adapter", "b": "second-adapter"}  # noqa: RUF012
    patience = 5.0  # what hangs here hangs for ever

    def __init__(self, mutant: Mutant, effort: float) -> None:
        self.mutant = mutant
        self.effort = effort

    def load(self, wrappers: Sequence[object]) -> AsyncLM:
        return self.mutant.load(wrappers)


def failures(mutant: Mutant) -> dict[str, str]:
    """The counterexamples by clause: its own clause in full, all others quickly."""
    own = run(Mutated(mutant, effort=1.0), only=lambda clause: clause == mutant.breaks)
    others = run(
        Mutated(mutant, effort=0.1), only=lambda clause: clause not in {mutant.breaks, *ELSEWHERE}
    )
    return {verdict.clause: verdict.detail for verdict in own.failed + others.failed}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_clause_and_only_what_names_the_same_fault(name: str) -> None:
    mutant = MUTANTS[name]
    failed = failures(mutant)
    assert mutant.breaks in failed
    surplus = set(failed) - {mutant.breaks} - mutant.may_break
    assert not surplus, {clause: failed[clause] for clause in surplus}


def test_every_clause_has_a_mutant() -> None:
    clauses = {clause.removeprefix("test_") for clause in ConformanceSuite.clauses}
    assert {mutant.breaks for mutant in MUTANTS.values()} == clauses - ELSEWHERE


IMPATIENT = """
import torch
from genlm.core.mock import genlm_backend_info, genlm_load
"""


def test_import_of_an_engine_with_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_installed(tmp_path, "impatient", "genlm_impatient", IMPATIENT)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    suite = Mutated(MUTANTS["TokensInDisorder"], effort=0.1)
    suite.backend = "impatient"
    (clause,) = run(
        suite, only=lambda clause: clause == "import_of_plugin_imports_no_engine"
    ).failed
    assert "imports torch" in clause.detail


DEFECTIVE = """
import pytest
from genlm.core.conformance import ConformanceSuite

class Mine(ConformanceSuite):
    backend = model = "mock"

class TestDeleted(Mine):
    test_large_batch = None

class TestOverridden(Mine):
    def test_large_batch(self, live):
        pass

class TestExcusedWithoutReason(Mine):
    @pytest.mark.xfail(strict=True)
    def test_large_batch(self, live):
        raise RuntimeError

class TestExcused(Mine):
    @pytest.mark.xfail(reason="no batch of forty fits", strict=True)
    def test_large_batch(self, live):
        raise RuntimeError
"""


def test_a_clause_that_was_deleted_or_overridden(tmp_path: Path) -> None:
    (tmp_path / "test_defective.py").write_text(DEFECTIVE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-k",
        "no_clause_is_missing or large_batch",
        "--rootdir",
        ".",
    ]
    output = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    ).stdout
    for line in (
        "FAILED test_defective.py::TestDeleted::test_no_clause_is_missing",
        "FAILED test_defective.py::TestOverridden::test_no_clause_is_missing",
        "FAILED test_defective.py::TestExcusedWithoutReason::test_no_clause_is_missing",
        "PASSED test_defective.py::TestExcused::test_no_clause_is_missing",
        "XFAIL test_defective.py::TestExcused::test_large_batch - no batch of forty fits",
    ):
        assert line in output
