"""The clauses on the state that an engine keeps of contexts, for further models and settings of an
engine that passes the whole suite on one model."""

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
    """The suite without the clauses on sampling, adapters, loading and closing, which are the same
    for all models of an engine."""
