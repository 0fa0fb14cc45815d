"""ConformanceSuite: what a plugin inherits."""

from __future__ import annotations

from typing import ClassVar

import pytest

from genlm.conformance.adapters import AdapterClauses, AdapterFileClauses
from genlm.conformance.capacity import CapacityClauses
from genlm.conformance.compare import check
from genlm.conformance.contention import ContentionClauses
from genlm.conformance.declaration import Declaration
from genlm.conformance.extremes import ExtremeClauses
from genlm.conformance.faults import FaultClauses
from genlm.conformance.histories import GrowthClauses, HistoryClauses
from genlm.conformance.identity import IdentityClauses
from genlm.conformance.lengths import ContinuationClauses, LengthClauses
from genlm.conformance.lifecycle import LifecycleClauses
from genlm.conformance.process import ProcessClauses
from genlm.conformance.rows import RowClauses
from genlm.conformance.sampling import SamplingClauses
from genlm.conformance.schedule import ScheduleClauses
from genlm.conformance.state import StateClauses
from genlm.conformance.subject import Subject

SUBJECT = pytest.StashKey[Subject]()

#: Clauses in which everything meets: any fault may fail them. The first makes its example simple.
INVOLVED_CLAUSES = (
    "test_requests_on_a_schedule",
    "test_cancelled_requests_leave_nothing",
)


class OneModel(Declaration):
    """Loads the model that a class of clauses shares."""

    def subject(self) -> Subject:
        """The model under test, not loaded yet."""
        return Subject(self)

    @pytest.fixture
    def live(self, request: pytest.FixtureRequest) -> Subject:
        """The model under test, shared by the clauses of one class."""
        node = request.node.getparent(pytest.Class)
        subject: Subject | None = node.stash.get(SUBJECT, None)
        if subject is None:
            node.stash[SUBJECT] = subject = self.subject()
            node.addfinalizer(subject.close)
        return subject.begin(self)


# Clauses run from the last base to the first. Cheap clauses on single rows come first, then those
# that catch most faults for their time (`nox -s mutants` prints both); those that close the model
# come last.
class ConformanceSuite(
    LifecycleClauses,
    HistoryClauses,
    ProcessClauses,
    FaultClauses,
    AdapterFileClauses,
    ExtremeClauses,
    SamplingClauses,
    AdapterClauses,
    GrowthClauses,
    ScheduleClauses,
    ContinuationClauses,
    ContentionClauses,
    # Capacity is compared before and after cancellations, so other clauses must not cancel before.
    CapacityClauses,
    IdentityClauses,
    LengthClauses,
    StateClauses,
    RowClauses,
    OneModel,
):
    """Every clause of the contract, as tests. Inherit it, name the backend and a model, and run
    pytest::

        class TestMine(ConformanceSuite):
            backend = "mine"
            model = "path-or-hub-id"

    The attributes and methods of :class:`~genlm.conformance.declaration.Declaration` describe the
    model. The names of clauses are stable.
    """

    clauses: ClassVar[tuple[str, ...]]

    def test_no_clause_is_missing(self) -> None:
        """No clause is deleted, and a clause is overridden only by a test that is marked
        ``xfail(reason=..., strict=True)``."""
        for name in ConformanceSuite.clauses:
            own = getattr(type(self), name, None)
            check(callable(own), f"{type(self).__name__} has deleted the clause {name}")
            if own is not getattr(ConformanceSuite, name):
                marks = [mark for mark in getattr(own, "pytestmark", []) if mark.name == "xfail"]
                excused = any(
                    mark.kwargs.get("reason") and mark.kwargs.get("strict") for mark in marks
                )
                check(
                    excused,
                    f"{type(self).__name__} overrides {name} without xfail(reason=..., "
                    "strict=True)",
                )


def clause_names(suite: type[OneModel]) -> tuple[str, ...]:
    """The names of the clauses, in the order in which pytest runs them."""
    names = [
        name for cls in reversed(suite.__mro__) for name in vars(cls) if name.startswith("test_")
    ]
    return tuple(dict.fromkeys(names))


ConformanceSuite.clauses = clause_names(ConformanceSuite)
