"""Faults in batches, and in state kept between requests."""

from __future__ import annotations

import math

from attrs import evolve

from genlm.core import AsyncLM, Query, hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine

from ..blind.common import Forgetting
from .registry import breaks


@breaks("batch_answers_in_order")
class RowsInTheWrongOrder(MockEngine):
    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return super().genlm_next_token_logprobs(queries).flip(0)


@breaks("batch_answers_in_order")
class BatchesSorted(AsyncLM):
    """A batch comes back sorted by length, as it went to the engine."""

    async def batch_next_token_logprobs(self, token_ids_list, **options):
        rows = await super().batch_next_token_logprobs(token_ids_list, **options)
        return rows[sorted(range(len(rows)), key=lambda i: len(token_ids_list[i]))]


@breaks("same_tail_under_different_prefixes")
class DeduplicationBySuffix(MockEngine):
    """Queries of one batch whose last token is the same share a row."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        by_tail: dict[int, Query] = {}
        return super().genlm_next_token_logprobs(
            [by_tail.setdefault(q.token_ids[-1], q) for q in queries]
        )


@breaks("same_tail_under_different_prefixes")
class ContinuousDeduplicationBySuffix(ContinuousMockEngine):
    """Queries in flight together whose last token is the same share a row."""

    @hookimpl
    def genlm_step(self, queries):
        answers = self.advance(queries)
        by_tail = {}
        return [
            evolve(a, result=by_tail.setdefault(a.request.token_ids[-1], a.result)) for a in answers
        ]


@breaks("warm_row_equals_cold_row")
class WarmRowsOneTokenShort(Forgetting, MockEngine, known=set):
    """A context that was evaluated before starts from its own state, and is evaluated without its
    last token."""

    def row(self, query):
        again = not query.cold and query in self.known and len(query.token_ids) > 1
        self.known.add(query)
        return super().row(evolve(query, token_ids=query.token_ids[:-1]) if again else query)


@breaks("extended_context")
class ExtensionsAtTheWrongPosition(Forgetting, MockEngine, last=tuple):
    """A context that extends one evaluated just before is evaluated as if that were not there."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        extends = bool(self.last) and query.token_ids[:-1] == self.last
        self.last = query.token_ids
        return super().row(evolve(query, token_ids=query.token_ids[-1:]) if extends else query)


@breaks("forked_contexts")
class StateChangedByItsReader(Forgetting, MockEngine, states=dict):
    """The state of a context grows with whoever extends it, so that later readers start from
    something else."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        own = self.states.setdefault(query, query)
        parent = evolve(query, token_ids=query.token_ids[:-1]) if len(query.token_ids) > 1 else None
        if parent in self.states:
            self.states[parent] = query
        return super().row(own)


@breaks("pinned_prefix")
class PinnedPrefixCountedTwice(MockEngine):
    """A context that begins with a pinned prefix is evaluated with the prefix twice."""

    def row(self, query):
        for pinned in [] if query.cold else self.pinned:
            n = len(pinned.token_ids)
            if (
                pinned.adapter == query.adapter
                and pinned.token_ids == query.token_ids[:n] != query.token_ids
            ):
                return super().row(evolve(query, token_ids=pinned.token_ids + query.token_ids))
        return super().row(query)


@breaks("dropped_state")
class DroppedStateStillUsed(MockEngine):
    """After the state was dropped, what was pinned is read as if it were nothing."""

    stale = frozenset()

    def row(self, query):
        if not query.cold and query in self.stale:
            return super().row(evolve(query, token_ids=query.token_ids * 2))
        return super().row(query)

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.stale = set(self.pinned)
        super().genlm_clear_kv_cache()


@breaks("contexts_that_differ_in_one_token", max_context=1024)
class MiddleNotHashed(Forgetting, MockEngine, first=dict):
    """Contexts are found by their length and their first and last 16 tokens."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        ids = query.token_ids
        key = query.adapter, len(ids), ids[:16], ids[-16:]
        return super().row(self.first.setdefault(key, query))


@breaks("warm_row_equals_cold_row")
class TailIsFlat(MockEngine):
    """Tokens less likely than 1e-5 have an even share of what they have together."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        for row in rows if not queries[0].cold else []:
            few = row < -11.5
            if few.any():
                row[few] = row[few].logsumexp(0) - math.log(int(few.sum()))
        return rows


@breaks("state_after_an_error")
class HalfAStateIsKept(MockEngine):
    """A call that raises has stored the state of its contexts already, without their last token:
    what goes on from it is wrong."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.halves: set = set()

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        try:
            return super().genlm_next_token_logprobs(queries)
        except Exception:
            self.halves |= {(q.token_ids, q.adapter) for q in queries if q.length > 2}
            raise

    def row(self, query):
        for end in range(3, query.length):
            if (query.token_ids[:end], query.adapter) in self.halves and not query.cold:
                shorter = query.token_ids[: end - 1] + query.token_ids[end:]
                return super().row(evolve(query, token_ids=shorter))
        self.halves.discard((query.token_ids, query.adapter))
        return super().row(query)
