"""What the core owes its callers, whatever the engine: clauses that only a faulty core can break.
They are written with the means of the conformance suite, and run on the mocks.
"""

from __future__ import annotations

from genlm.conformance.suite import OneModel

from .callers import CallerClauses
from .closing import ClosingClauses
from .rows import RowClauses
from .wrappers import WrapperClauses


class CoreClauses(ClosingClauses, WrapperClauses, CallerClauses, RowClauses, OneModel):
    """All of them."""

    backend = "mock"
    model = "mock"
