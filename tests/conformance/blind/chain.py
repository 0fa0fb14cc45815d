"""A batch engine: a recurrent model of hashes, with snapshots of its state, and samples and scores
of its own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from itertools import count

import torch
from attrs import evolve

from genlm.core import Query, hookimpl
from genlm.core.mock import ByteTokenizer

from .hashing import WIDTH, mix, numbers_of, weights_of
from .registry import breaks
from .sampler import Sampler, drawn

#: A long context leaves a snapshot each time it has grown by this many tokens.
SNAPSHOT_TOKENS = 32


class Chain:
    """The sound engine. State is kept by the version of the adapter and the tokens.

    Attributes:
        limit: How many snapshots are kept beside pins.
    """

    tokenizer, vocab_size, max_context = ByteTokenizer(), WIDTH, 4096
    device, model = "cpu", None
    sampler = Sampler
    limit = 512

    def __init__(self):
        self.weights = {0: 12345}
        self.states, self.pins = OrderedDict(), {}
        self.tokenizer = copy.copy(self.tokenizer)

    def owner(self, query):
        return query.adapter.version if query.adapter else 0

    def key(self, query, tokens):
        return self.owner(query), tokens

    def start(self, query):
        return self.weights[self.owner(query)]

    def known(self, key):
        if key in self.states:
            self.states.move_to_end(key)
            return self.states[key]
        return self.pins.get(key)

    def keep(self, key, state):
        self.states[key] = state
        while len(self.states) > self.limit:
            self.states.popitem(last=False)

    def state(self, query):
        tokens, n = query.token_ids, query.length
        at, state = 0, self.start(query)
        if not query.cold:
            for length in (
                n,
                n - 1,
                *range((n - 1) // SNAPSHOT_TOKENS * SNAPSHOT_TOKENS, 0, -SNAPSHOT_TOKENS),
            ):
                found = self.known(self.key(query, tokens[:length])) if length else None
                if found is not None:
                    at, state = length, found
                    break
        for i in range(at, n):
            state = mix(state, tokens[i])
            if (i + 1) % SNAPSHOT_TOKENS == 0 or i + 1 == n:
                self.keep(self.key(query, tokens[: i + 1]), state)
        return state

    def row(self, query):
        return torch.from_numpy(numbers_of(self.state(query)))

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return torch.stack([self.row(query) for query in queries])

    @hookimpl
    def genlm_sample(self, queries, params):
        if any(how.max_tokens > 300 for how in params):
            return None
        return [*map(self.draw, queries, params, count())]

    def draw(self, query, how, place):
        row_after = lambda ids: self.row(query.extended(ids))  # noqa: E731
        return drawn(self.sampler(how), how.max_tokens, how.stop_token_ids, row_after)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        return [*map(self.score, queries, continuations)]

    def score(self, query, ids):
        return torch.stack([self.row(query.extended(tuple(ids[:i])))[t] for i, t in enumerate(ids)])

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.pins[self.key(query, query.token_ids)] = self.state(query)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.states.clear()
        self.pins.clear()

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.weights[adapter.version] = weights_of(adapter)
        return True

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.weights[adapter.version]
        for store in (self.states, self.pins):
            for key in [key for key in store if key[0] == adapter.version]:
                del store[key]
        return True


@breaks("pinned_contexts_are_moved_with_the_others")
class PinIgnoresTheAdapter(Chain):
    """A pinned prompt's state serves the same tokens under any adapter."""

    def known(self, key):
        found = super().known(key)
        others = (state for (_, tokens), state in self.pins.items() if tokens == key[1])
        return next(others, None) if found is None else found


@breaks("rebound_adapter")
class SlotOfAnAdapter(Chain):
    """State is kept by the adapter's slot, which the next adapter gets with all that is in it."""

    def __init__(self):
        super().__init__()
        self.slots = {0: 0}

    def key(self, query, tokens):
        return self.slots[self.owner(query)], tokens

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.slots[adapter.version] = next(i for i in count() if i not in self.slots.values())
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        del self.weights[adapter.version], self.slots[adapter.version]
        return True


@breaks("scores_at_every_length")
class ScoreAtTheEndOfABlock(Chain):
    """The score of one token after whole blocks is that of a token earlier."""

    def score(self, query, ids):
        if query.length % SNAPSHOT_TOKENS == 0 and len(ids) == 1:
            return self.row(Query(query.token_ids[:-1], query.adapter))[list(ids)]
        return super().score(query, ids)


@breaks("requests_on_a_schedule")
class SeedByPlace(Chain):
    """A seeded sample depends on its place in the batch."""

    def draw(self, query, how, place):
        seed = None if how.seed is None else how.seed + place
        return super().draw(query, evolve(how, seed=seed), place)


@breaks("options_together")
class TopPBeforeTopK(Chain):
    """``top_p`` comes before ``top_k``."""

    class sampler(Sampler):
        def filtered(self, p):
            return self.top_k(self.top_p(p))


@breaks("every_token_stops")
class FirstTokenNeverStops(Chain):
    """A stop token that is drawn first is part of the result."""

    def draw(self, query, how, place):
        (first,) = super().draw(query, evolve(how, max_tokens=1, stop_token_ids=frozenset()), place)
        whole = super().draw(query, how, place)
        return whole or [first]


@breaks("contract_is_kept_throughout")
class RowsInABuffer(Chain):
    """The row of a batch of one lies in a buffer, into which the next call writes."""

    buffer = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        if len(queries) > 1:
            return rows
        self.buffer = rows if self.buffer is None else self.buffer.copy_(rows)
        return self.buffer


@breaks("large_batch")
class EvictedWithinABatch(Chain):
    """A context gets the state of a later one if it is evicted within its batch, which has more
    contexts than there is room for."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows, n = super().genlm_next_token_logprobs(queries), len(queries)
        return rows[[i if n - i <= 256 else i + 256 for i in range(n)]]


@breaks("adapter_that_fails_to_load")
class ReadsAdaptersAgain(Chain):
    """When state is cleared, weights are read again from the adapters' paths."""

    def __init__(self):
        super().__init__()
        self.added = []

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.added.append(adapter)
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        for adapter in self.added:
            self.weights[adapter.version] = weights_of(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.added.remove(adapter)
        return super().genlm_remove_lora(adapter)


@breaks("seed_fixes_the_draw")
class SeedZeroIsNone(Chain):
    """``seed=0`` is no seed."""

    class sampler(Sampler):
        def seed(self):
            return self.how.seed or None


@breaks("engine_keeps_its_contract")
class SeedOf32Bits(Chain):
    """A seed of more than 32 bits raises."""

    class sampler(Sampler):
        def seed(self):
            if (self.how.seed or 0) >= 1 << 32:
                raise OverflowError("Python int too large to convert to C unsigned int")
            return self.how.seed


@breaks("long_continuations")
class ScoredTokensAreBytes(Chain):
    """The scorer keeps a continuation as bytes: ids from 256 on wrap around."""

    def score(self, query, ids):
        after = [query.extended(tuple(x % 256 for x in ids[:i])) for i in range(len(ids))]
        return torch.stack([self.row(one)[t] for one, t in zip(after, ids, strict=True)])


@breaks("adapter_in_sampling")
class DrawsKeepStateOfTheBase(Chain):
    """The state of a sample under an adapter is kept under the base model."""

    def draw(self, query, how, place):
        ids = super().draw(query, how, place)
        if query.adapter and len(ids) > 3:
            longer = query.extended(tuple(ids[:3]))
            self.keep((0, longer.token_ids), self.state(longer))
        return ids


@breaks("requests_on_a_schedule")
class OneTemperature(Chain):
    """All samples of a batch have the temperature of its first."""

    @hookimpl
    def genlm_sample(self, queries, params):
        same = [evolve(how, temperature=params[0].temperature) for how in params]
        return super().genlm_sample(queries, same)


@breaks("adapters_are_bound_and_pinned_again_and_again")
class WeightsByPath(Chain):
    """Names of one path share weights, and removing one name removes them for all."""

    def __init__(self):
        super().__init__()
        self.paths, self.by_path = {}, {}

    def start(self, query):
        owner = self.owner(query)
        return self.by_path[self.paths[owner]] if owner else self.weights[0]

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.paths[adapter.version] = adapter.path
        self.by_path[adapter.path] = weights_of(adapter)
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.by_path.pop(self.paths[adapter.version], None)
        return super().genlm_remove_lora(adapter)


@breaks("contexts_grow_across_every_length")
class LongContextsInHalfPrecision(Chain):
    """Contexts of more than 700 tokens are answered in float16."""

    def row(self, query):
        row = super().row(query)
        long = query.length > 700 and not query.cold
        return row.half().float().log_softmax(-1) if long else row
