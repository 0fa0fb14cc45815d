"""Faults in rows and whose memory they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from attrs import evolve

from genlm.core import AsyncLM, hookimpl
from genlm.core.mock import MockEngine

from ..blind.common import Forgetting, Keeping
from .registry import breaks


@breaks("vocabulary_is_consistent")
class TokensInDisorder(AsyncLM):
    @property
    def byte_vocab(self):
        first, second, *others = super().byte_vocab
        return [second, first, *others]


@breaks("row_is_normalised")
class UnnormalisedRows(MockEngine):
    def row(self, query):
        return super().row(query) + 0.01


@breaks("every_way_of_asking_agrees")
class BatchesAtAnotherTemperature(AsyncLM):
    def batch_next_token_logprobs_sync(self, *args, **options):
        return (super().batch_next_token_logprobs_sync(*args, **options) / 2).log_softmax(dim=-1)


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


@breaks("row_belongs_to_its_caller")
class SharedRows(Keeping, AsyncLM, rows=weakref.WeakValueDictionary):
    """Who asks for a context of which somebody has the row gets that very tensor."""

    async def next_token_logprobs(self, token_ids, **options):
        row = await super().next_token_logprobs(token_ids, **options)
        return self.rows.setdefault((tuple(token_ids), *options.items()), row)


def giving(name: str, changed: Callable[[torch.Tensor], torch.Tensor]) -> type:
    """A model that changes the rows of the asynchronous single request."""

    class Giving(AsyncLM):
        async def next_token_logprobs(self, *args, **options):
            return changed(await super().next_token_logprobs(*args, **options))

    Giving.__name__ = name
    return Giving


for name, clause, changed in (
    ("DoubleRows", "row_has_shape_and_type", lambda row: row.double()),
    ("RowsWithGraph", "row_has_shape_and_type", lambda row: row.requires_grad_()),
    ("RowsThatAreViews", "row_does_not_keep_its_batch", lambda row: torch.stack([row, row])[0]),
    # The sum of a row is computed in a shorter type.
    ("NormalisedRoughly", "row_is_normalised", lambda row: row + 1.1e-4),
):
    breaks(clause)(giving(name, changed))
