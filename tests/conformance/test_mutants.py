"""The suite bites: every clause fails on a model that breaks it, and has one.

How much it bites, and which clause catches what, is measured by ``nox -s mutants``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog

from genlm.conformance import ConformanceSuite, Violation
from genlm.conformance.report import run
from genlm.core.errors import InvalidOptionError
from genlm.core.mock import MockEngine

from .faulty import OfTheMock, of_a_mutant, verdict_on
from .mutants import MUTANTS

pytestmark = pytest.mark.any_version

#: Clauses that check the requests of earlier clauses, with those clauses.
LOOKS_BACK = {
    "contract_is_kept_throughout": {
        "batch_answers_in_order",
        "nobody_is_passed_over",  # It asks while a step is held, which wakes the step.
        "scores_together",
    },
    "oracle_has_not_changed": {"batch_answers_in_order", "removed_adapter"},
}


#: Clauses that no mock can break: those on the plugin's module and on the class have tests of their
#: own, those on torch modules and on the folders of adapters have mutants of a tiny real model.
PLANTED = {
    "import_of_plugin_imports_no_engine",
    "no_clause_is_missing",
    "unknown_option_is_refused",
    "weights_changed_in_place",
    "same_path_with_other_weights",
    "adapter_of_another_model",
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """No logs: of an exception in every call they take longer than the clauses."""
    with structlog.testing.capture_logs():
        yield


def test_every_clause_has_a_mutant() -> None:
    clauses = {name.removeprefix("test_") for name in ConformanceSuite.clauses}
    assert clauses == {mutant.breaks for mutant in MUTANTS.values()} | PLANTED


def test_every_clause_names_a_likeliest_cause_and_existing_clauses() -> None:
    clauses = {name.removeprefix("test_") for name in ConformanceSuite.clauses}
    advice = {
        name: getattr(getattr(ConformanceSuite, f"test_{name}"), "advice", None) for name in clauses
    }
    assert {name for name, one in advice.items() if one is None} == {"no_clause_is_missing"}
    assert {other for one in advice.values() if one for other in one.others} <= clauses


class Seedless(OfTheMock):
    excused = {"seeds": "there is no generator"}  # noqa: RUF012


def test_excused_capability_is_skipped_with_its_reason() -> None:
    clauses = "seed_fixes_the_draw", "top_k_beyond_the_vocabulary", "row_is_normalised"
    suite = Seedless(MockEngine, effort=0.1)
    report = run(suite, only=lambda clause: clause in clauses)
    assert [verdict.status for verdict in report.verdicts] == ["passed", "skipped", "skipped"]
    assert all(
        verdict.detail == "excused from 'seeds': there is no generator"
        for verdict in report.skipped
    )
    assert "mock conforms (excused from: seeds)" in report.summary()


def test_unknown_capability_or_missing_reason_is_rejected() -> None:
    suite = OfTheMock(MockEngine, effort=0.1)
    for excused, said in (
        ({"rows": "they are wrong"}, "'rows'.*'seeds'"),
        ({"wake": ""}, "say why"),
    ):
        suite.excused = excused
        with pytest.raises(InvalidOptionError, match=said):
            suite.subject()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("BlocksByTheirSum", "in the order B A C"),
        ("BlocksByTheirSum", "Likeliest cause: the hash of a block"),
        ("BlocksByTheirSum", "See also: equal_ends_behind_different_beginnings."),
        ("OldestTokensMakeRoom", "pinned prompts of"),
        ("PinsOfRemovedAdaptersStay", "removing an adapter does not give pins back"),
        ("ClearKeepsPins", "after clear_kv_cache() it fails too"),
        ("PinnedPrefixCountedTwice", "before it: cache_kv(["),
        ("NeighboursTopK", "or they have the top_k or temperature of another request"),
        ("WaitsForTheDead", "before it: the engine's own processes were killed (1)"),
    ],
)
def test_failure_names_the_cause(name: str, said: str) -> None:
    mutant = MUTANTS[name]
    assert said in verdict_on(of_a_mutant(mutant, effort=1.0), mutant.breaks).detail


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_fails_its_clause(name: str) -> None:
    mutant = MUTANTS[name]
    needed = {mutant.breaks, *LOOKS_BACK.get(mutant.breaks, ())}
    report = run(of_a_mutant(mutant, effort=1.0), only=lambda clause: clause in needed)
    verdict = report.verdicts[-1]
    assert verdict.status == "failed", verdict.detail


ACCEPTING = """
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl

@hookimpl
def genlm_load(model, options):
    return mock.MockEngine(mock.ByteTokenizer())
"""

IMPATIENT = """
import torch
from genlm.core.mock import genlm_backend_info, genlm_load
"""


@pytest.mark.parametrize(
    ("source", "clause", "said"),
    [
        (ACCEPTING, "unknown_option_is_refused", "no_such_option=1 was accepted"),
        (IMPATIENT, "import_of_plugin_imports_no_engine", "imports torch"),
    ],
    ids=["accepting", "impatient"],
)
def test_faulty_plugin_module_fails_its_clause(
    install, source: str, clause: str, said: str
) -> None:
    install("faulty", source)
    suite = ConformanceSuite()
    suite.backend, suite.model = "faulty", "mock"
    verdict = verdict_on(suite, clause)
    assert verdict.status == "failed"
    assert said in verdict.detail


class Deleted(ConformanceSuite):
    test_large_batch = None


class Overridden(ConformanceSuite):
    def test_large_batch(self, live):
        pass


class ExcusedWithoutReason(ConformanceSuite):
    @pytest.mark.xfail(strict=True)
    def test_large_batch(self, live):
        raise RuntimeError


class Excused(ConformanceSuite):
    @pytest.mark.xfail(reason="no batch of forty fits", strict=True)
    def test_large_batch(self, live):
        raise RuntimeError


def test_deleted_or_overridden_clause_is_a_failure() -> None:
    with pytest.raises(Violation, match="Deleted has deleted the clause test_large_batch"):
        Deleted().test_no_clause_is_missing()
    for suite in (Overridden(), ExcusedWithoutReason()):
        with pytest.raises(Violation, match="overrides test_large_batch without xfail"):
            suite.test_no_clause_is_missing()
    Excused().test_no_clause_is_missing()


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("SecondWakeIsLost", "genlm_wake must end the step"),
        ("ThreadOutlivesTheModel", "threads that are left of a closed model: worker ("),
        ("EndTokenAlwaysStops", "and not the model's own end-of-sequence token"),
    ],
)
def test_failure_says_what_to_do(name: str, remedy: str) -> None:
    mutant = MUTANTS[name]
    assert remedy in verdict_on(of_a_mutant(mutant, effort=1.0), mutant.breaks).detail
