"""ConformanceSuite: what a plugin inherits."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from genlm.core.conformance.adapter_files import AdapterFileClauses
from genlm.core.conformance.adapters import AdapterClauses
from genlm.core.conformance.callers import CallerClauses
from genlm.core.conformance.company import CompanyClauses, CrowdClauses
from genlm.core.conformance.compare import ATOL, check
from genlm.core.conformance.faults import FaultClauses, failing_forward
from genlm.core.conformance.histories import GrowthClauses, HistoryClauses
from genlm.core.conformance.lengths import ContinuationClauses, LengthClauses
from genlm.core.conformance.lifecycle import LifecycleClauses
from genlm.core.conformance.machine import MachineClauses
from genlm.core.conformance.refusals import RefusalClauses
from genlm.core.conformance.rows import OwnershipClauses, RowClauses
from genlm.core.conformance.sampling import SamplingClauses
from genlm.core.conformance.schedule import ScheduleClauses
from genlm.core.conformance.seeds import SeedClauses
from genlm.core.conformance.state import BatchClauses, StateClauses
from genlm.core.conformance.subject import Subject
from genlm.core.conformance.tokens import TokenizerClauses
from genlm.core.conformance.wrappers import ChangedRowClauses, LostAnswerClauses
from genlm.core.lm import AsyncLM, load_model_by_name
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

SUBJECT = pytest.StashKey[Subject]()

#: Clauses in which everything meets: any fault may fail them.
INVOLVED = (
    "test_cancelled_requests_leave_nothing",
    "test_requests_on_a_schedule",
    "test_any_order_of_operations",
)


# Clauses run from the last base to the first: cheap ones on single rows, then those that catch most
# for their time (`nox -s mutants` prints both), and at the end those that close the model.
class ConformanceSuite(
    ChangedRowClauses,
    LifecycleClauses,
    HistoryClauses,
    MachineClauses,
    FaultClauses,
    AdapterFileClauses,
    RefusalClauses,
    SamplingClauses,
    SeedClauses,
    AdapterClauses,
    CallerClauses,
    LostAnswerClauses,
    OwnershipClauses,
    GrowthClauses,
    ScheduleClauses,
    ContinuationClauses,
    CompanyClauses,
    CrowdClauses,
    LengthClauses,
    StateClauses,
    BatchClauses,
    RowClauses,
    TokenizerClauses,
):
    """Every clause of the contract, as tests. Inherit it, name the backend and a model, and run
    pytest::

        class TestMine(ConformanceSuite):
            backend = "mine"
            model = "path-or-hub-id"

    An attribute may be a property, for paths that are made when the tests run. Clauses are not
    renamed lightly.

    Attributes:
        backend: The name of the entry point.
        model: What ``load_model_by_name`` takes.
        adapters: Paths of two or more LoRA adapters of that model, by name. With fewer, some
            clauses are skipped.
        atol: The tolerance of probabilities; ten times that of the top log-probabilities. For other
            types than float32 see :data:`~genlm.core.conformance.compare.ATOL`.
        options: Further ``llm_opts``.
        effort: Multiplies the numbers of examples; 0.1 takes about a tenth of the time.
        patience: The most seconds to wait for what must happen before the suite says that it hangs.
        longest: The longest context to ask, in tokens; ``None`` is what the engine can bear.
        window: How many tokens back the model looks; ``None`` is all of them.
        ignores_tokens: Whether the model may give contexts that differ the same row, as a back-off
            model does.
        reference: Another backend that takes the same model, to compare the cold rows with.
        second_model: Whether a second model of the backend has room in the process.
        text_is_normalised: Whether the tokenizer changes text, for instance to lower case.
        seed: Chooses the examples; the same seed gives the same ones in every run.
    """

    backend: str
    model: str | os.PathLike[str]
    adapters: Mapping[str, str | os.PathLike[str]] = {}
    atol: float = ATOL["float32"]
    options: Mapping[str, Any] = {}
    effort: float = 1.0
    patience: float = 120.0
    longest: int | None = None
    window: int | None = None
    ignores_tokens: bool = False
    reference: str | None = None
    second_model: bool = True
    text_is_normalised: bool = False
    seed: int = 0

    clauses: ClassVar[tuple[str, ...]]

    def load(self, wrappers: Sequence[object]) -> AsyncLM:
        """Load the model with further wrappers around its engine. Override it for a model that is
        made in another way."""
        options = {**self.options, "wrappers": [*self.options.get("wrappers", ()), *wrappers]}
        return load_model_by_name(os.fspath(self.model), self.backend, options)

    def reference_rows(self, contexts: Sequence[TokenIds]) -> Sequence[torch.Tensor] | None:
        """The rows of some contexts under the base model, computed without the backend; ``None``
        where there are none. Override it, or set :attr:`reference`."""
        if self.reference is None:
            return None
        with load_model_by_name(os.fspath(self.model), self.reference) as lm:
            return [lm.next_token_logprobs_uncached(ids).cpu() for ids in contexts]

    def subject(self) -> Subject:
        """The model under test, not loaded yet."""
        return Subject(self)

    def fail_inside(self, lm: AsyncLM) -> Callable[[int], AbstractContextManager[None]] | None:
        """A way to make the engine itself fail in the middle of its work; ``None`` where there is
        none. Override it for an engine whose model is not a torch module in this process.

        Returns:
            A function that takes a number of times and returns a context manager: inside it, that
            many of the next evaluations fail.
        """
        return failing_forward(lm.underlying_model)

    @pytest.fixture
    def live(self, request: pytest.FixtureRequest) -> Subject:
        """The model under test, shared by the clauses of one class."""
        node = request.node.getparent(pytest.Class)
        subject: Subject | None = node.stash.get(SUBJECT, None)
        if subject is None:
            node.stash[SUBJECT] = subject = self.subject()
            node.addfinalizer(subject.close)
        subject.suite = self
        return subject.begin()

    def test_no_clause_is_missing(self) -> None:
        """No clause was deleted, and none overridden but by one marked ``xfail(reason=...,
        strict=True)``."""
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


def clause_names(suite: type[ConformanceSuite]) -> tuple[str, ...]:
    """The names of the clauses, in the order in which pytest runs them."""
    names = [
        name for cls in reversed(suite.__mro__) for name in vars(cls) if name.startswith("test_")
    ]
    return tuple(dict.fromkeys(names))


ConformanceSuite.clauses = clause_names(ConformanceSuite)
