"""Faults in state that is kept between requests."""

from __future__ import annotations

import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import MockEngine

from .registry import MUTANTS, Forgetting, breaks
from .rows import BLOCK, of

#: Clauses that test everything at once have no context longer than this many tokens.
LONG_TOKENS = 2 * BLOCK


class FoundBy(Forgetting, MockEngine, first=dict):
    """Contexts with the same key, which ``change`` makes, have the row of the first of them."""

    def row(self, query):
        return super().row(
            query if query.cold else self.first.setdefault(self.change(query), query)
        )


MUTANTS.changes(
    FoundBy,
    ("StateKeptWithoutItsAdapter", "adapters_in_turn", lambda e, q: q.token_ids),
    # A name that is rebound finds the blocks of its former adapter:
    # https://github.com/vllm-project/vllm/issues/42125 and 30931
    (
        "ReboundNameKeepsItsBlocks",
        "rebound_adapter",
        lambda e, q: (q.adapter.name, q.token_ids) if q.adapter and q.length > LONG_TOKENS else q,
    ),
)
MUTANTS.changes(
    FoundBy,
    (
        "MiddleNotHashed",
        "contexts_that_differ_in_one_token",
        lambda e, q: (q.adapter, q.length, q.token_ids[:16], q.token_ids[-16:]),
    ),
    (
        "SumIsTheKey",
        "contexts_that_differ_in_one_token",
        lambda e, q: (q.adapter, q.length, sum(i * i for i in q.token_ids), q.token_ids[-1]),
    ),
    max_context=1024,
)


MUTANTS.changes(
    FoundBy,
    # A last block is found by its own tokens and place, whatever is before it.
    (
        "LastBlockWithoutItsParents",
        "equal_ends_behind_different_beginnings",
        lambda e, q: (q.adapter, q.length, q.token_ids[-16:]) if q.length >= LONG_TOKENS else q,
    ),
    max_context=1024,
)


class Remembering(Forgetting, MockEngine, asked=list, batched=set):
    """Remembers the contexts of the base model that were evaluated, and replays the last token of
    one that was :meth:`spoilt` by others."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self._obey(queries)
        rows = [self.row(self.read(query, len(queries) == 1)) for query in queries]
        for query in queries:
            if not query.cold and query.adapter is None:
                self.asked.append(query.token_ids)
                if len(queries) > 1:
                    self.batched.add(query.token_ids)
        return torch.stack(rows)

    def read(self, query, alone):
        kept = not query.cold and query.adapter is None
        return replayed(query) if kept and self.spoilt(query.token_ids, alone) else query

    def spoilt(self, ids, alone):
        """Whether the state of a context is wrong, which may be alone in its batch."""
        return False

    def extensions(self, ids):
        return {other for other in self.asked if len(other) > len(ids) and begins(other, ids)}


def replayed(query):
    return of(query, *query.token_ids, query.token_ids[-1])


def begins(longer, ids):
    return longer[: len(ids)] == ids


@breaks("cold_row_is_repeatable")
class ColdRowsInUsedBlocks(Remembering):
    """A cold evaluation is given blocks into which a batch wrote."""

    def row(self, query):
        ids = query.token_ids
        used = query.cold and len(ids) > LONG_TOKENS and ids in self.batched
        return super().row(replayed(query) if used else query)


@breaks("warm_row_equals_cold_row", "https://github.com/yanun0323/Whallm/issues/5")
class PartlyFullBlockReplayed(Remembering):
    """A context found again replays the last token of a block that is about half full."""

    def spoilt(self, ids, alone):
        half_full = len(ids) > BLOCK and 6 <= len(ids) % BLOCK <= 10
        return alone and half_full and ids in self.asked and not self.extensions(ids)


@breaks("extended_context", "https://github.com/tenstorrent/vllm/issues/415")
class FourthStepOneOff(Remembering):
    """The position is kept beside the state, and is one off after four steps of one token."""

    def spoilt(self, ids, alone):
        return len(ids) > 4 and self.asked[-4:] == [ids[:-n] for n in (4, 3, 2, 1)]


@breaks("forked_contexts")
class StemMovedByItsForks(Remembering):
    """Two forks leave the state of their stem behind the second one."""

    def spoilt(self, ids, alone):
        return (
            alone and len(ids) > LONG_TOKENS and ids in self.asked and len(self.extensions(ids)) > 1
        )


@breaks("pinned_prefix")
class PinnedPrefixMovedByItsReaders(Remembering):
    """Two contexts that begin with a pinned prefix leave its state behind the second one."""

    def spoilt(self, ids, alone):
        pinned = any(p.token_ids == ids and p.adapter is None for p in self.pinned)
        moved = len(ids) > LONG_TOKENS and len(self.extensions(ids)) > 1
        return pinned and moved and ids not in self.asked


@breaks("pinned_prefix")
class PinnedPrefixCountedTwice(MockEngine):
    """A context that begins with a pinned prefix is evaluated with the prefix twice."""

    def row(self, query):
        for pinned in [] if query.cold or query in self.pinned else self.pinned:
            if pinned.adapter == query.adapter and begins(query.token_ids, pinned.token_ids):
                return super().row(of(query, *pinned.token_ids, *query.token_ids))
        return super().row(query)


@breaks("pinned_prefix")
class PinnedOnce(MockEngine):
    """A prefix that is pinned already is rejected; the core pins it again after a failed call."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        if query in self.pinned:
            raise RuntimeError("it is pinned already")
        return super().genlm_cache_prefix(query)


@breaks("dropped_state")
class DroppedBatchIsFoundAgain(Remembering):
    """Dropping state forgets the blocks of what was pinned, and not the hash by which a batch
    finds them."""

    stale = frozenset()

    def spoilt(self, ids, alone):
        return ids in self.stale

    @hookimpl
    def genlm_clear_kv_cache(self):
        pinned = {p.token_ids for p in self.pinned if len(p.token_ids) > LONG_TOKENS}
        self.stale = pinned & self.batched
        super().genlm_clear_kv_cache()


@breaks(
    "rows_at_every_length",
    "https://github.com/huggingface/transformers/pull/24653",
    max_context=1024,
)
class RotaryBaseOfTheCachedKeys(Remembering):
    """Beyond the trained length the rotary base changes; keys in the cache keep the old one."""

    def spoilt(self, ids, alone):
        return len(ids) > 512 and any(len(a) <= 512 and begins(ids, a) for a in self.asked)


@breaks("contexts_grow_across_every_length", max_context=1024)
class NewBlockMissesTheTokenBefore(Remembering):
    """A context that grows into a new block of 64 tokens does not see the last token of the old
    block."""

    def spoilt(self, ids, alone):
        return len(ids) % 64 == 1 and len(ids) > 64 and ids[:-1] in self.asked


@breaks("forks_at_every_length", max_context=1024)
class ForksTakeAWholeBlock(Remembering):
    """A fork of a long context takes the block in which it leaves with it."""

    def spoilt(self, ids, alone):
        # A context is found by its last two tokens alone, beside one of more than two blocks more.
        return any(
            len(other) > len(ids) + 2 * BLOCK
            and begins(other, ids[:-2])
            and not begins(other, ids[:-1])
            for other in self.asked
        )


@breaks("scores_at_every_length", "https://github.com/vllm-project/vllm/issues/3251")
class ScoresShiftedByThePrefix(Remembering):
    """The computed length counts as 0 where part is cached: scores are those of other positions."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        known = [any(begins(query.token_ids, a) for a in self.asked) for query in queries]
        return [s.roll(1) if hit else s for s, hit in zip(scores, known, strict=True)]


@breaks("adapters_in_turn", "https://github.com/ggml-org/llama.cpp/issues/26207")
class ExtensionsReadTheFirstAdaptersBlocks(Forgetting, MockEngine, first=dict):
    """The blocks of a prompt are those of the adapter that filled them first."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        ids = query.token_ids
        prompts = (ids[:end] for end in range(LONG_TOKENS, len(ids)))
        adapter = next((self.first[p] for p in prompts if p in self.first), query.adapter)
        self.first.setdefault(ids, query.adapter)
        return super().row(evolve(query, adapter=adapter))


@breaks("requests_on_a_schedule", "https://github.com/ggml-org/llama.cpp/issues/7859")
class DrawnTokensStay(Forgetting, MockEngine, left=dict):
    """Drawn tokens stay in a sequence of several blocks: the next request decodes after them."""

    @hookimpl
    def genlm_sample(self, queries, params):
        drawn = super().genlm_sample(queries, params)
        for query, ids in zip(queries, drawn, strict=True):
            if query.length > LONG_TOKENS:
                self.left[query] = tuple(ids)
        return drawn

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return super().genlm_next_token_logprobs(
            [q if q.cold else q.extended(self.left.pop(q, ())) for q in queries]
        )


@breaks("large_batch", "https://github.com/ggml-org/llama.cpp/issues/12253")
class EvictedAndStillFound(Forgetting, MockEngine, table=dict, places=dict):
    """A table for 200 contexts: when it is full, the first are overwritten and still found."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        if query not in self.places:
            self.places[query] = len(self.places) % 200
            self.table[self.places[query]] = query
        return super().row(self.table[self.places[query]])


@breaks("two_long_contexts_in_turn", "https://github.com/huggingface/transformers/pull/24653")
class ColdTablesOfTheLongOne(Forgetting, MockEngine, changed=bool):
    """A context as long as the model takes changes the tables by which short ones are computed
    cold, until key/value state is dropped."""

    def row(self, query):
        self.changed |= query.length == self.max_context and not query.cold
        small = BLOCK // 2 < query.length < BLOCK - 1
        return super().row(replayed(query) if self.changed and small and query.cold else query)


@breaks("state_after_an_error")
class HalfAStateIsKept(Forgetting, MockEngine, halves=set):
    """A call that raises has stored the state of its contexts already, without their last token:
    what goes on from it is wrong."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        try:
            return super().genlm_next_token_logprobs(queries)
        except Exception:
            self.halves |= {query for query in queries if query.length > 2}
            raise

    def row(self, query):
        ids = query.token_ids
        for end in range(3, query.length):
            if not query.cold and of(query, *ids[:end]) in self.halves:
                return super().row(of(query, *ids[: end - 1], *ids[end:]))
        self.halves.discard(query)
        return super().row(query)


@breaks("error_inside_the_engine", "https://github.com/vllm-project/vllm/pull/50283")
class NaNStaysInTheBlock(MockEngine):
    """A request that fails leaves NaN in its block, and the next context there reads it."""

    poisoned = False

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        try:
            rows = super().genlm_next_token_logprobs(queries)
        except Exception:
            self.poisoned = True
            raise
        if self.poisoned and not queries[0].cold and len(queries) > 1:
            self.poisoned = False
            rows[-1] = float("nan")
        return rows
