"""Faults with adapters."""

from __future__ import annotations

from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import MockEngine

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
class FailedLoadingEmptiesTheSlot(MockEngine):
    """An adapter that cannot be loaded has emptied the slots before it was looked at: the base
    model answers in the place of the others."""

    empty = False

    @hookimpl
    def genlm_add_lora(self, adapter):
        if adapter.path == "there-is-no-such-adapter":
            self.empty = True
            raise FileNotFoundError(adapter.path)
        self.empty = False
        return super().genlm_add_lora(adapter)

    def row(self, query):
        return super().row(evolve(query, adapter=None) if self.empty else query)


@breaks("adapters_added_at_once")
class ContentsLeftOnTheEngine(MockEngine):
    """What was read is left on the engine, where the next one who reads puts its own."""

    @hookimpl
    def genlm_read_lora(self, adapter):
        self.last = adapter.path

    @hookimpl
    def genlm_add_lora(self, adapter, contents):
        self.paths = {**self.__dict__.get("paths", {}), adapter: self.last}
        return super().genlm_add_lora(adapter)

    def row(self, query):
        if query.adapter is None:
            return super().row(query)
        adapter = evolve(query.adapter, path=self.paths[query.adapter])
        return super().row(evolve(query, adapter=adapter))
