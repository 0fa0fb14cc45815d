"""Faults in rows and whose memory they are."""

from __future__ import annotations

from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import MockEngine

from ..blind.common import Forgetting
from .registry import breaks


@breaks("row_is_normalised")
class UnnormalisedRows(MockEngine):
    def row(self, query):
        return super().row(query) + 0.01


@breaks("cold_row_is_repeatable")
class ColdRowsThatReadState(Forgetting, MockEngine, known=set):
    """A cold query reads the state that warm ones left, and that with a fault: the oracle itself is
    wrong."""

    def row(self, query):
        if query.cold and query.token_ids in self.known:
            return super().row(evolve(query, token_ids=query.token_ids * 2))
        if not query.cold:
            self.known.add(query.token_ids)
        return super().row(query)


@breaks("engine_keeps_its_contract")
class PrefixRefusedQuietly(MockEngine):
    """A hook returns what its contract does not know."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        return not super().genlm_cache_prefix(query)


@breaks("engine_keeps_its_contract")
class PrefixPinnedWithoutAWord(MockEngine):
    """The hook returns nothing, as if the engine did not have it."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        super().genlm_cache_prefix(query)


@breaks("longest_context")
class LastPositionMissing(MockEngine):
    """The longest context is cut by one token."""

    def row(self, query):
        full = len(query.token_ids) == self.max_context and not query.cold
        return super().row(evolve(query, token_ids=query.token_ids[1:]) if full else query)


@breaks("row_is_normalised")
class NormalisedRoughly(MockEngine):
    """The sum of a row is computed in a shorter type."""

    def row(self, query):
        return super().row(query) + 1.5e-4
