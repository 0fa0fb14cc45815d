"""Further mutants of a tiny real model behind ``genlm-hf``: what breaks where requests meet.
Written after the clauses on schedules, and before any clause was run on them.

Each cites a thread that reports the bug, or one of its kind.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import evolve

from genlm.core import Query, hookimpl
from genlm.hf.engine import HFEngine
from genlm.kit.prefixes import key_of, shared_length

from .at_work_on_a_real_model import Steps
from .common import Forgetting, Keeping, Mutants

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in


def shared_by(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two contexts begin with alike."""
    return shared_length(key_of(0, one), key_of(0, other))


@seen_in("https://github.com/vllm-project/vllm/issues/23697")
class AbortMeetsTheSameRequestAgain(Steps):
    """A request that is dropped, and asked again in that step or the next one, is dropped again."""

    late: Sequence[Query] = ()

    def given(self, queries, dropped):
        aborted, self.late = {*self.late, *dropped}, dropped
        return [(query, query) for query in queries if query not in aborted]


@seen_in("https://github.com/tenstorrent/tt-xla/issues/5830")
class IdleRowsGetAToken(Keeping, Steps, waiting=dict):
    """Of 16 places, who waits for one for more than three steps gets a token 0 at the end."""

    def given(self, queries, dropped):
        self.waiting = {query: n + 1 for query, n in self.waiting.items() if query not in dropped}
        self.waiting.update(dict.fromkeys(queries, 0))
        free = max(16 - len(self.asked), 0)
        admitted = list(self.waiting.items())[:free]
        for query, _ in admitted:
            del self.waiting[query]
        return [(query, self.after(query, steps)) for query, steps in admitted]

    def after(self, query, steps):
        if steps <= 3 or query.length >= self.max_context:
            return query
        return evolve(query, token_ids=(*query.token_ids, 0))

    def lost(self):
        self.waiting.clear()


@seen_in("https://github.com/vllm-project/vllm/issues/37076")
class OneTokenMoreOfASharedBeginning(Steps):
    """Of two contexts of a step that share a long beginning, the second gets one token more of the
    first."""

    def given(self, queries, dropped):
        return [(query, self.shares(query, queries[:at])) for at, query in enumerate(queries)]

    def shares(self, query, others):
        ids = query.token_ids
        for other in others:
            shared = shared_by(ids, other.token_ids)
            if other.adapter == query.adapter and 64 <= shared < min(len(ids), other.length) - 1:
                one_more = other.token_ids[: shared + 1]
                return evolve(query, token_ids=(*one_more, *ids[shared + 1 :]))
        return query


@seen_in("https://github.com/ggml-org/llama.cpp/issues/27148")
class RestoredWhole(Forgetting, Steps, kept=dict):
    """A context that was moved out of the slots is restored for a newcomer that shares half of it,
    and all of it is used."""

    slots = 32

    def given(self, queries, dropped):
        given = [(query, self.restored(query)) for query in queries]
        self.kept.update(dict.fromkeys(queries))
        return given

    def restored(self, query):
        ids = query.token_ids
        for old in list(self.kept)[: -self.slots]:
            shared = shared_by(ids, old.token_ids)
            if old.adapter == query.adapter and old.length / 2 <= shared < old.length < len(ids):
                return evolve(query, token_ids=(*old.token_ids, *ids[old.length :]))
        return query


@seen_in("https://github.com/RBLN-SW/optimum-rbln/issues/649")
class MultiplesOfAChunkInCompany(Steps):
    """A prompt of exactly some chunks of 128 tokens gets the row before its last token, where
    others run beside it."""

    def given(self, queries, dropped):
        company = bool(self.asked) or len(queries) > 1
        return [(query, self.cut(query) if company else query) for query in queries]

    def cut(self, query):
        if query.length % 128:
            return query
        return evolve(query, token_ids=query.token_ids[:-1])


@seen_in("https://github.com/vllm-project/vllm/issues/47724")
class ThirdAdapterTakesTheFirstsPlace(Steps):
    """There is room for two adapters in a step; the third takes the place of the first."""

    def given(self, queries, dropped):
        running = [*self.asked, *queries]
        adapters = list(dict.fromkeys(query.adapter for query in running if query.adapter))
        places = dict(zip(adapters, adapters[2:], strict=False))
        return [
            (query, evolve(query, adapter=places.get(query.adapter, query.adapter)))
            for query in queries
        ]


@seen_in("https://github.com/lightseekorg/tokenspeed/pull/976")
class ShortPromptsAreOfTheBaseModel(Forgetting, Steps, filed=dict):
    """Prompts with an adapter that fill no page are filed as the base model's."""

    def given(self, queries, dropped):
        given = [(query, self.found(query)) for query in queries]
        for query in queries:
            if query.adapter is not None and query.length < 16:
                self.filed[query.token_ids] = query.adapter
        return given

    def found(self, query):
        filed = self.filed.get(query.token_ids[:-1])
        return query if query.adapter or filed is None else evolve(query, adapter=filed)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.filed = {ids: filed for ids, filed in self.filed.items() if filed != adapter}
        return super().genlm_remove_lora(adapter)


@seen_in("https://github.com/vllm-project/vllm/pull/9057")
class AdapterOfTheFirstInLaterChunks(Steps):
    """A chunk of more than 32 tokens that goes on from what is known gets the adapter of the first
    in the batch."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        packed = self._runner.packed

        def of_the_first(chunks, tokens, adapters, wanted):
            changed = [
                adapters[0] if chunk.start > 0 and chunk.size > 32 else adapter
                for chunk, adapter in zip(chunks, adapters, strict=True)
            ]
            return packed(chunks, tokens, changed, wanted)

        self._runner.packed = of_the_first


@seen_in("https://github.com/vllm-project/vllm/pull/42245")
class ScoresOfCachedPositionsAreStale(Forgetting, HFEngine, scored=set):
    """Where a continuation was scored before, the scores of its cached pages are what the buffer
    held."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.buffer = torch.zeros(0)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        return [
            self.stale(query, (*query.token_ids, *continuation), score)
            for query, continuation, score in zip(queries, continuations, scores, strict=True)
        ]

    def stale(self, query, ids, score):
        known = [old for adapter, old in self.scored if adapter == query.adapter]
        shared = max((shared_by(ids, old) for old in known), default=0)
        cached = min(max(shared // 16 * 16 - query.length, 0), len(self.buffer))
        stale = torch.cat([self.buffer[:cached], score[cached:]])
        self.scored.add((query.adapter, ids))
        self.buffer = score
        return stale
