"""Clauses that only a faulty core can break, whatever the engine.

They use the helpers of the conformance suite, and run over an engine that computes
batches, and over a continuous one.
"""

from __future__ import annotations

import pytest

from genlm.conformance.suite import OneModel

from .callers import CallerClauses
from .closing import ClosingClauses
from .rows import RowClauses
from .wrappers import WrapperClauses

pytestmark = pytest.mark.any_version


class CoreClauses(ClosingClauses, WrapperClauses, CallerClauses, RowClauses, OneModel):
    """All of them."""

    backend = "mock"
    model = "mock"


class TestOnBatches(CoreClauses):
    options = {"max_context": 64}  # noqa: RUF012


class TestOnSteps(CoreClauses):
    options = {"max_context": 64, "continuous": True, "steps": 3}  # noqa: RUF012
