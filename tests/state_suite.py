"""The clauses on what an engine keeps of contexts: for further models and settings of an engine
that keeps the whole contract on one."""

from __future__ import annotations

from genlm.conformance.histories import GrowthClauses, HistoryClauses
from genlm.conformance.lengths import ContinuationClauses, LengthClauses
from genlm.conformance.rows import RowClauses
from genlm.conformance.schedule import ScheduleClauses
from genlm.conformance.state import StateClauses
from genlm.conformance.suite import OneModel


class StateSuite(
    HistoryClauses,
    GrowthClauses,
    ScheduleClauses,
    ContinuationClauses,
    LengthClauses,
    StateClauses,
    RowClauses,
    OneModel,
):
    """How draws are made, what adapters do, and how a model begins and ends, is the same for all
    models of an engine."""
