"""The clauses on the core bite: each fails on a model that breaks it."""

from __future__ import annotations

from typing import Any

import pytest

from genlm.conformance.report import run
from genlm.conformance.subject import Subject
from genlm.conformance.suite import clause_names
from genlm.core import AsyncLM
from tests.conformance.mutants.registry import Mutant

from .mutants import MUTANTS
from .suite import CoreClauses, Poison


class OfAMutant(CoreClauses):
    adapters = {"a": "first-adapter", "b": "second-adapter"}  # noqa: RUF012
    patience = 2.0  # what hangs here hangs for ever

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.poison = Poison()

    def load(self, **core: Any) -> AsyncLM:
        return self.mutant.load(fail_on=self.poison, **core)

    def subject(self) -> Subject:
        subject = super().subject()
        subject.shrinking = 0.0
        return subject


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails_its_clause(name: str) -> None:
    mutant = MUTANTS[name]
    (verdict,) = run(OfAMutant(mutant), only=lambda clause: clause == mutant.breaks).verdicts
    assert verdict.status == "failed", verdict.detail


def test_every_clause_has_a_mutant() -> None:
    clauses = {name.removeprefix("test_") for name in clause_names(CoreClauses)}
    assert clauses == {mutant.breaks for mutant in MUTANTS.values()}
