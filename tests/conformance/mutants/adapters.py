"""Faults with adapters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from genlm.core import AsyncLM, Query, hookimpl
from genlm.core.mock import ByteTokenizer, MockEngine

from ..blind.common import Forgetting, Keeping
from .registry import breaks


@breaks("adapter_changes_the_rows")
class AdaptersIgnored(MockEngine):
    def row(self, query):
        return super().row(evolve(query, adapter=None))


@breaks("adapters_in_one_batch")
class AdapterBleedsIntoTheBatch(MockEngine):
    """The adapter of the first query is applied to the whole batch."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return super().genlm_next_token_logprobs(
            [evolve(query, adapter=queries[0].adapter) for query in queries]
        )


@breaks("adapters_in_turn")
class StateKeptWithoutItsAdapter(Forgetting, MockEngine, by_tokens=dict):
    """State is kept by tokens alone: the next adapter reads what the last one left."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        return super().row(self.by_tokens.setdefault(query.token_ids, query))


@breaks("default_adapter")
class NoneIsTheDefault(AsyncLM):
    """An explicit ``None`` is taken for no choice."""

    async def next_token_logprobs(self, token_ids, lora_name=None):
        chosen = {} if lora_name is None else {"lora_name": lora_name}
        return await super().next_token_logprobs(token_ids, **chosen)


@breaks("rebound_adapter")
class ReboundNameKeepsItsWeights(Keeping, MockEngine, paths=dict):
    """Weights are kept by name: a name bound again has those of before."""

    def row(self, query):
        if query.adapter is None:
            return super().row(query)
        path = self.paths.setdefault(query.adapter.name, query.adapter.path)
        return super().row(evolve(query, adapter=evolve(query.adapter, path=path)))


@breaks("removed_adapter")
class RemovingOneRemovesAll(MockEngine):
    @hookimpl
    def genlm_remove_lora(self, adapter):
        # The newest is spared, as it may be the one that takes the removed one's place.
        for version in sorted(self.adapters)[:-1]:
            del self.adapters[version]
        return True


@breaks("adapter_that_fails_to_load")
class FailedLoadingLosesTheOldOne(AsyncLM):
    def add_new_lora(self, lora_path, lora_name="lora_1"):
        if lora_path == "there-is-no-such-adapter":
            self.remove_lora(lora_name)
            raise FileNotFoundError(lora_path)
        super().add_new_lora(lora_path, lora_name)


class EngineWithoutLoRA:
    """An engine that has rows, and nothing else."""

    def __init__(self, tokenizer: Any, max_context: int) -> None:
        self._mock = MockEngine(tokenizer, max_context=max_context)
        self.tokenizer, self.vocab_size = tokenizer, len(tokenizer)
        self.max_context, self.device, self.model = max_context, "cpu", None

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        return self._mock.genlm_next_token_logprobs(queries)


@breaks("lora_without_support")
class MissingLoRAPassedOver(AsyncLM):
    """Adding an adapter does nothing where the engine cannot."""

    def __init__(self, load, **options):
        super().__init__(lambda: EngineWithoutLoRA(ByteTokenizer(), max_context=64), **options)

    def add_new_lora(self, lora_path, lora_name="lora_1"):
        pass
