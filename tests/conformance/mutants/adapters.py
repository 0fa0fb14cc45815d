"""Faults with adapters."""

from __future__ import annotations

from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import MockEngine

from .registry import Forgetting, Keeping, OneAfterTheOther, breaks
from .state import begins


@breaks("cold_rows_are_the_reference")
class AnotherScale(MockEngine):
    """Every row of an adapter is another one, the cold ones too, as where its scale is left out."""

    def row(self, query):
        if query.adapter is not None:
            scaled = evolve(query.adapter, path=f"half of {query.adapter.path}")
            query = evolve(query, adapter=scaled)
        return super().row(query)


@breaks("rebound_adapter")
class ReboundNameKeepsItsWeights(Keeping, MockEngine, paths=dict):
    """Weights are kept by name: a name bound again has those of before, also after it was removed:
    https://github.com/vllm-project/vllm/issues/42633"""

    def row(self, query):
        if query.adapter is None:
            return super().row(query)
        path = self.paths.setdefault(query.adapter.name, query.adapter.path)
        return super().row(evolve(query, adapter=evolve(query.adapter, path=path)))


@breaks("rebound_adapter")
class ReboundNameGoesWithTheOldOne(Keeping, MockEngine, names=set):
    """Weights go by name: what is bound again goes with the old one, and then the base answers."""

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.names.add(adapter.name)
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.names.discard(adapter.name)
        return super().genlm_remove_lora(adapter)

    def row(self, query):
        known = query.adapter is not None and query.adapter.name in self.names
        return super().row(query if known else evolve(query, adapter=None))


@breaks("removed_adapter")
class RemovingOneRemovesAll(MockEngine):
    @hookimpl
    def genlm_remove_lora(self, adapter):
        # The newest adapter is spared: it may be the one that takes the place of a removed one.
        for version in sorted(self.adapters)[:-1]:
            del self.adapters[version]
        return True


@breaks("many_adapters", "https://github.com/vllm-project/vllm-metal/pull/641")
class ThirdAdapterEvictsTheFirst(MockEngine):
    """More adapters than slots: the weights of the oldest are gone, and its rows are the base's."""

    def row(self, query):
        resident = query.adapter is None or query.adapter.version in list(self.adapters)[-2:]
        return super().row(query if resident else evolve(query, adapter=None))


@breaks("adapter_that_fails_to_load", "https://github.com/mflux-community/mflux/issues/629")
class FailedLoadMovesTheOthers(MockEngine):
    """An adapter that cannot be loaded has emptied the slots before it was looked at: the base
    model answers in the place of the others."""

    failed = False

    @hookimpl
    def genlm_add_lora(self, adapter):
        if "no-such" in adapter.path:  # The mock itself takes any path.
            self.failed = True
            raise FileNotFoundError(adapter.path)
        return super().genlm_add_lora(adapter)

    def row(self, query):
        return super().row(evolve(query, adapter=None) if self.failed else query)


@breaks("adapters_added_at_once")
class ContentsLeftOnTheEngine(Keeping, MockEngine, paths=dict):
    """The contents of an adapter are kept on the engine, where the next read overwrites them."""

    @hookimpl
    def genlm_read_lora(self, adapter):
        self.last = adapter.path

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        self.paths = {**self.paths, adapter: self.last}
        return super().genlm_add_lora(adapter)

    def row(self, query):
        if query.adapter is None:
            return super().row(query)
        adapter = evolve(query.adapter, path=self.paths[query.adapter])
        return super().row(evolve(query, adapter=adapter))


@breaks("error_inside_the_engine", "https://github.com/huggingface/peft/issues/2270")
class AdapterSwitchLost(MockEngine):
    """After an exception in a batch with an adapter, the adapter stays on for the base's rows."""

    left = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        if self.left is not None and not any(query.adapter for query in queries):
            queries = [evolve(query, adapter=self.left) for query in queries]
        try:
            return super().genlm_next_token_logprobs(queries)
        except Exception:
            self.left = next((query.adapter for query in queries if query.adapter), None)
            raise

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.left = None
        return super().genlm_remove_lora(adapter)


@breaks("adapter_in_sampling", "https://github.com/lightseekorg/tokenspeed/pull/976")
class DrawsForgetTheAdapter(OneAfterTheOther, Forgetting, MockEngine, left=dict):
    """The state of a sample is kept as the base model's."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        if query.adapter is not None:
            self.left[query.extended(tuple(drawn)).token_ids] = query.adapter
        return drawn

    def row(self, query):
        if query.adapter is not None or query.cold:
            return super().row(query)
        filed = (adapter for ids, adapter in self.left.items() if begins(query.token_ids, ids))
        return super().row(evolve(query, adapter=next(filed, None)))


@breaks("scores_together", "https://github.com/unslothai/unsloth/issues/2142")
class ScoresWithoutTheAdapter(MockEngine):
    """Scoring goes through the base model whatever adapter was asked."""

    def _score(self, query, continuation):
        return super()._score(evolve(query, adapter=None), continuation)


@breaks("removed_adapter")
class ClearForgetsAdapters(Keeping, MockEngine, plain=set):
    """To clear the state lays the base model's weights anew, and adapters with them."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        self.plain |= {*self.adapters}

    def row(self, query):
        plain = query.adapter is not None and query.adapter.version in self.plain
        return super().row(evolve(query, adapter=None) if plain else query)


@breaks("oracle_has_not_changed", "https://github.com/huggingface/peft/issues/1388")
class DriftsWithEveryAdapter(MockEngine):
    """Adding and removing adapters changes the base model, a little each time."""

    removed = 0

    def row(self, query):
        return (super().row(query) * (1 + 1e-3 * self.removed)).log_softmax(-1)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.removed += 1
        return super().genlm_remove_lora(adapter)
