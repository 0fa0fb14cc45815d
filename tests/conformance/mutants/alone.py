"""Faults that one clause alone sees: each clause has its own part of the space.

Sizes are those of real engines: blocks of 16 tokens, graphs for 128 rows. What is longer than two
blocks is out of reach of the clause on everything at once, whose contexts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from genlm.core import AsyncLM, Query, hookimpl
from genlm.core.errors import (
    UnknownAdapterError,
)
from genlm.core.mock import MockEngine

from ..blind.common import Forgetting, Keeping
from .registry import breaks

BLOCK = 16
LONG = 2 * BLOCK


class Remembering(Forgetting, MockEngine, asked=list, batched=set):
    """Remembers what was evaluated until key/value state is dropped."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        self._obey(queries)
        rows = [self.row(self.confused(query, len(queries))) for query in queries]
        for query in queries:
            if not query.cold and query.adapter is None:
                self.asked.append(query.token_ids)
                if len(queries) > 1:
                    self.batched.add(query.token_ids)
        return torch.stack(rows)

    def confused(self, query: Query, together: int) -> Query:
        """The query that is answered in the place of one of a batch."""
        raise NotImplementedError


def replayed(query: Query) -> Query:
    """With the last token twice."""
    return evolve(query, token_ids=(*query.token_ids, query.token_ids[-1]))


@breaks("cold_row_is_repeatable")
class ColdRowsInUsedBlocks(Remembering, cold=set):
    """A cold evaluation is given the blocks of one before it, into which a batch wrote."""

    def confused(self, query, together):
        ids = query.token_ids
        if not query.cold or len(ids) <= LONG:
            return query
        used = ids in self.cold and ids in self.batched
        self.cold.add(ids)
        return replayed(query) if used else query


@breaks("large_batch", "https://github.com/ggml-org/llama.cpp/pull/14853")
class SecondMicroBatchReversed(MockEngine):
    """What is beyond the first 128 rows of a batch comes back in the opposite order."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        return torch.cat([rows[:128], rows[128:].flip(0)])


@breaks("same_tail_under_different_prefixes")
class DeduplicationBehindPinnedPrefixes(MockEngine):
    """Of contexts behind pinned prefixes only what follows the prefix is compared."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        by_tail: dict[Any, Query] = {}
        return super().genlm_next_token_logprobs(
            [by_tail.setdefault(self.key(query), query) for query in queries]
        )

    def key(self, query):
        for pinned in self.pinned:
            length = len(pinned.token_ids)
            of_it = pinned.adapter == query.adapter and pinned.token_ids == query.token_ids[:length]
            if BLOCK < length < len(query.token_ids) and of_it:
                return query.token_ids[length:]
        return query


@breaks("longest_context")
class DrawEndsBeforeTheLimit(MockEngine):
    """A draw that would fill the context ends one token before."""

    @hookimpl
    def genlm_sample(self, queries, params):
        limit = (self.max_context or 1 << 30) - 1
        room = [limit - len(query.token_ids) for query in queries]
        return super().genlm_sample(
            queries,
            [
                evolve(p, max_tokens=max(min(p.max_tokens, left), 1)) if p.max_tokens > 1 else p
                for p, left in zip(params, room, strict=True)
            ],
        )


@breaks("warm_row_equals_cold_row", "https://github.com/yanun0323/Whallm/issues/5")
class PartlyFullBlockReplayed(Remembering):
    """A context that was the last one, found again, replays the last token of a block that is
    about half full."""

    def confused(self, query, together):
        ids = query.token_ids
        half_full = len(ids) > BLOCK and 6 <= len(ids) % BLOCK <= 10
        longer = any(len(a) > len(ids) and a[: len(ids)] == ids for a in self.asked)
        known = ids in self.asked and not longer and query.adapter is None
        return (
            replayed(query) if half_full and known and together == 1 and not query.cold else query
        )


@breaks("extended_context")
class FourthStepOneOff(Remembering):
    """The position is kept beside the state, and is one off after four steps of one token."""

    def confused(self, query, together):
        ids, last = query.token_ids, self.asked[-4:]
        steps = [ids[:-n] for n in (4, 3, 2, 1)]
        return replayed(query) if len(ids) > 4 and last == steps and not query.cold else query


@breaks("forked_contexts")
class StemMovedByItsForks(Remembering):
    """Two forks leave the state of their stem behind the second one."""

    def confused(self, query, together):
        ids = query.token_ids
        if query.cold or query.adapter or together > 1 or ids not in self.asked:
            return query
        forks = {a for a in self.asked if len(a) > len(ids) and a[: len(ids)] == ids}
        return replayed(query) if len(forks) > 1 and len(ids) > LONG else query


@breaks("pinned_prefix")
class PinnedPrefixMovedByItsReaders(Remembering):
    """Two contexts that begin with a pinned prefix leave its state behind the second one."""

    def confused(self, query, together):
        ids = query.token_ids
        is_pinned = any(p.token_ids == ids and p.adapter is None for p in self.pinned)
        if not is_pinned or query.cold or query.adapter or ids in self.asked:
            return query
        readers = {a for a in self.asked if len(a) > len(ids) and a[: len(ids)] == ids}
        return replayed(query) if len(readers) > 1 and len(ids) > LONG else query


@breaks("dropped_state")
class DroppedBatchIsFoundAgain(Remembering):
    """Dropping state forgets the blocks of what was pinned, and not the hash by which a batch
    finds them."""

    stale: frozenset[tuple[int, ...]] = frozenset()

    def confused(self, query, together):
        found = query.token_ids in self.stale and query.adapter is None and not query.cold
        return replayed(query) if found else query

    @hookimpl
    def genlm_clear_kv_cache(self):
        pinned = {p.token_ids for p in self.pinned if len(p.token_ids) > LONG}
        self.stale = frozenset(pinned & self.batched)
        super().genlm_clear_kv_cache()


@breaks("adapters_in_turn", "https://github.com/ggml-org/llama.cpp/issues/26207")
class ExtensionsReadTheFirstAdaptersBlocks(Remembering, first=dict):
    """The blocks of a prompt are those of the adapter that filled them first."""

    def confused(self, query, together):
        ids = query.token_ids
        if query.cold or together > 1:
            return query
        parents = [
            self.first[ids[:end]] for end in range(LONG, len(ids)) if ids[:end] in self.first
        ]
        self.first.setdefault(ids, query)
        return evolve(query, adapter=parents[0].adapter) if parents else query


@breaks("rebound_adapter", "https://github.com/vllm-project/vllm/issues/42125")
class ReboundNameKeepsItsBlocks(Forgetting, MockEngine, first=dict):
    """Blocks are found by the name of the adapter: a name bound anew finds those of before."""

    def row(self, query):
        if query.cold or query.adapter is None or len(query.token_ids) <= LONG:
            return super().row(query)
        first = self.first.setdefault((query.adapter.name, query.token_ids), query)
        return super().row(first)


@breaks("removed_adapter")
class RowsOutliveTheirAdapter(Keeping, AsyncLM, kept=dict):
    """A row of several blocks is answered from a cache that does not ask whether its adapter is
    still there."""

    async def next_token_logprobs(self, token_ids, **options):
        key = repr((token_ids, options))
        try:
            row = await super().next_token_logprobs(token_ids, **options)
        except UnknownAdapterError:
            if key not in self.kept:
                raise
            return self.kept[key].clone()
        if len(token_ids) > LONG:
            self.kept[key] = row.clone()
        return row

    def clear_cache(self):
        super().clear_cache()
        self._forget()


@breaks("requests_on_a_schedule", "https://github.com/ggml-org/llama.cpp/issues/7859")
class DrawnTokensStay(Forgetting, MockEngine, left=dict):
    """What was drawn stays in a sequence of several blocks: the next request decodes after it."""

    @hookimpl
    def genlm_sample(self, queries, params):
        drawn = super().genlm_sample(queries, params)
        for query, ids in zip(queries, drawn, strict=True):
            if len(query.token_ids) > LONG:
                self.left[query] = ids
        return drawn

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self._obey(queries)
        left = [() if q.cold else tuple(self.left.pop(q, ())) for q in queries]
        return torch.stack(
            [self.row(q.extended(ids)) for q, ids in zip(queries, left, strict=True)]
        )


@breaks("requests_on_a_schedule", "https://github.com/ggml-org/llama.cpp/issues/12253")
class EvictedAndStillFound(Forgetting, MockEngine, table=list, places=dict):
    """A table for 320 contexts: when it is full, the first are overwritten and still found."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        if query not in self.places:
            self.places[query] = len(self.places) % 320
            self.table[self.places[query] :] = [query, *self.table[self.places[query] + 1 :]]
        return super().row(self.table[self.places[query]])


@breaks("two_long_contexts_in_turn", "https://github.com/huggingface/transformers/pull/24653")
class ColdTablesOfTheLongOne(MockEngine):
    """A context as long as the model takes changes the tables by which short ones are computed
    cold, until key/value state is dropped."""

    changed = False

    def row(self, query):
        length = len(query.token_ids)
        self.changed |= length == self.max_context and not query.cold
        small = BLOCK // 2 < length < BLOCK - 1
        return super().row(replayed(query) if self.changed and small and query.cold else query)

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        self.changed = False


@breaks("oracle_has_not_changed")
class ColdRowsDrift(Keeping, MockEngine, evaluated=int, born=dict):
    """A cold row of several blocks is another one after thousands of evaluations."""

    def row(self, query):
        self.evaluated += 1
        row = super().row(query)
        if not query.cold or len(query.token_ids) <= LONG:
            return row
        age = self.evaluated - self.born.setdefault(query, self.evaluated)
        return (row * 1.01).log_softmax(-1) if age > 6000 else row


@breaks("nothing_grows")
class KeepsEveryRow(Keeping, MockEngine, kept=list):
    """Rows are kept until the model is closed."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        self.kept.append(rows.clone())
        return rows


@breaks("seed_fixes_the_draw")
class BatchSeedsFromOne(AsyncLM):
    """The places of a batch take seeds after the one that was given, the first one too."""

    async def batch_sample(self, prompts, *arguments, **options):
        if options.get("seed") is not None:
            options["seed"] += 1
        return await super().batch_sample(prompts, *arguments, **options)


@breaks(
    "draws_at_every_length", "https://github.com/vllm-project/vllm/pull/34587", max_context=1024
)
class DrawStumblesOverTheBlock(MockEngine):
    """The token drawn first in a new block does not see the one before it."""

    @hookimpl
    def genlm_sample(self, queries, params):
        self.drawing = True
        try:
            return super().genlm_sample(queries, params)
        finally:
            self.drawing = False

    drawing = False

    def row(self, query):
        ids = query.token_ids
        if self.drawing and len(ids) > 64 and len(ids) % 64 == 1:
            query = evolve(query, token_ids=(*ids[:-2], ids[-1]))
        return super().row(query)


# --- draws ------------------------------------------------------------------------------------


@breaks("draws_are_separate")
class OneStreamForTheCall(MockEngine):
    """Draws without a seed that are made in one call come from one seed."""

    @hookimpl
    def genlm_sample(self, queries, params):
        seed = int(torch.randint(1 << 30, ()))
        seeded = [p if p.seed is not None else evolve(p, seed=seed) for p in params]
        return super().genlm_sample(queries, seeded)


@breaks("temperature_zero_is_argmax")
class DraftAccepted(MockEngine):
    """Within the first block the third token of a greedy draw is taken from a draft, unseen."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        if params.temperature == 0.0 and len(drawn) > 2 and len(query.token_ids) < BLOCK // 2:
            drawn[2] = int(self.row(query.extended(tuple(drawn[:2]))).topk(2).indices[1])
        return drawn


@breaks("long_continuations")
class TokenBeforeTheStopLost(MockEngine):
    """What is held back until it is known whether the draw stops is lost when it does."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        stopped = len(drawn) < params.max_tokens and len(params.stop_token_ids) == 1
        return drawn[:-1] if stopped else drawn


@breaks("several_stop_tokens")
class FourthStopTokenForgotten(AsyncLM):
    """There is room for three stop tokens; the others are left out."""

    async def sample(self, prompt, max_tokens, eos_token_ids=None, **options):
        if isinstance(eos_token_ids, list):
            eos_token_ids = eos_token_ids[:3]
        return await super().sample(prompt, max_tokens, eos_token_ids, **options)


@breaks("max_tokens")
class NoTokensAreOne(AsyncLM):
    """``max_tokens=0`` is taken for no limit given, and one token is drawn."""

    async def sample(self, prompt, max_tokens, *args, **options):
        return await super().sample(prompt, max_tokens or 1, *args, **options)


@breaks("adapter_in_sampling")
class SecondTokenOfTheBaseModel(MockEngine):
    """The prompt is computed with the adapter, and the steps after it without."""

    def _draw(self, query, params):
        if query.adapter is None or params.max_tokens < 2:
            return super()._draw(query, params)
        first = super()._draw(query, evolve(params, max_tokens=1))
        base = evolve(query.extended(tuple(first)), adapter=None)
        return first + super()._draw(base, evolve(params, max_tokens=params.max_tokens - 1))


# --- the end ----------------------------------------------------------------------------------


@breaks("scores_together")
class EqualContinuationsScoredOnce(MockEngine):
    """In one batch equal continuations are scored once, whatever stands before them."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        known: dict = {}
        return [known.setdefault(tuple(c), s) for c, s in zip(continuations, scores, strict=True)]


@breaks("longest_context")
class LimitOneTooLong(MockEngine):
    """One token less than ``max_context`` fits: the first one goes, in cold rows too."""

    def row(self, query):
        full = query.length == self.max_context
        return super().row(evolve(query, token_ids=query.token_ids[1:]) if full else query)


@breaks("longest_context", max_context=3000)
class CoarseBeyondFifteenHundred(MockEngine):
    """Warm rows of more than 1,500 tokens are computed more coarsely."""

    def row(self, query):
        row = super().row(query)
        return row.half().float() if query.length > 1500 and not query.cold else row
