"""What the core owes its callers, whatever the engine: clauses that only a faulty core can break.
They are written with the means of the conformance suite, and run on the mocks.
"""

from __future__ import annotations

from genlm.conformance.suite import OneModel
from genlm.core import Query
from genlm.core.types import TokenIds

from .callers import CallerClauses
from .closing import ClosingClauses
from .machine import MachineClauses
from .rows import RowClauses
from .wrappers import WrapperClauses


class Poison:
    """Given to the mock as ``fail_on``: the engine fails on one context."""

    token_ids: TokenIds | None = None

    def __call__(self, query: Query) -> bool:
        return query.token_ids == self.token_ids


class CoreClauses(
    ClosingClauses,
    MachineClauses,
    WrapperClauses,
    CallerClauses,
    RowClauses,
    OneModel,
):
    """All of them. ``poison`` is what the mock fails on."""

    backend = "mock"
    model = "mock"
    poison: Poison
