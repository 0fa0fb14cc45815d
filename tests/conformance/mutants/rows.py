"""Faults in rows and whose memory they are."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from attrs import evolve

from genlm.core import AsyncLM, hookimpl
from genlm.core.mock import MockEngine

from ..blind.common import Forgetting
from .registry import breaks


class LMWith(AsyncLM):
    """A model that changes the rows of the asynchronous single request."""

    async def next_token_logprobs(self, *args: Any, **options: Any) -> torch.Tensor:
        return self.changed(await super().next_token_logprobs(*args, **options))

    def changed(self, row: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


@breaks("vocabulary_is_consistent")
class TokensInDisorder(AsyncLM):
    @property
    def byte_vocab(self):
        first, second, *others = super().byte_vocab
        return [second, first, *others]


@breaks("row_has_shape_and_type")
class DoubleRows(LMWith):
    def changed(self, row):
        return row.double()


@breaks("row_has_shape_and_type")
class RowsWithGraph(LMWith):
    def changed(self, row):
        return row.requires_grad_()


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
class SharedRows(AsyncLM):
    """Who asks for a context of which somebody has the row gets that very tensor."""

    async def next_token_logprobs(self, token_ids, **options):
        row = await super().next_token_logprobs(token_ids, **options)
        rows = self.__dict__.setdefault("rows", weakref.WeakValueDictionary())
        return rows.setdefault((tuple(token_ids), *options.items()), row)


@breaks("row_does_not_keep_its_batch")
class RowsThatAreViews(LMWith):
    def changed(self, row):
        return torch.stack([row, row])[0]
