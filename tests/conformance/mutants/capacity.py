"""Faults in what an engine has a number of, and in telling requests apart."""

from __future__ import annotations

from attrs import evolve

from genlm.core import Query, hookimpl
from genlm.core.mock import MockEngine

from .contention import Continuous
from .registry import Forgetting, Keeping, breaks
from .rows import BLOCK, of
from .working_engine import WorkingEngine


@breaks("dropped_under_one_adapter", hangs=True)
class DroppedUnderEveryAdapter(Continuous):
    """Dropped requests are looked up by their tokens."""

    def step(self, new, dropped):
        gone = {request.token_ids for request in dropped if isinstance(request, Query)}
        kept = {
            request: left
            for request, left in self._in_flight.items()
            if not isinstance(request, Query) or request.token_ids not in gone
        }
        self._in_flight = {**kept, **dict.fromkeys(dropped, 1)}
        return self.advance(new, dropped)


class BlocksBy(Forgetting, MockEngine, blocks=dict):
    """Blocks of eight tokens are found by a key, which :meth:`chained` makes."""

    def row(self, query):
        if query.cold:
            return super().row(query)
        tokens, key = list(query.token_ids), 0
        for at in range(0, len(tokens) - 8, 8):
            block = tuple(tokens[at : at + 8])
            key = self.chained(key, block)
            found = self.blocks.setdefault((query.adapter, at, key), block)
            tokens[at : at + 8] = found
        return super().row(of(query, *tokens))


@breaks("chunks_in_another_order", max_context=1024)
class BlocksByTheirSum(BlocksBy):
    """A block is found by the hashes of all blocks up to it, in any order."""

    def chained(self, key, block):
        return key ^ hash(block)


@breaks("cancelled_requests_give_their_places_back")
class PlacesLeakButTheLast(WorkingEngine):
    """A place is lost with every fourth request that is dropped while it runs; the last one
    serves everything."""

    lost = 0

    def drop(self, request):
        running = len(self.batch)
        super().drop(request)
        self.lost += running - len(self.batch)
        self.places = max(1, 64 - self.lost // 4)


@breaks("prompt_pinned_twice_is_cleared_once", max_context=1024)
class PinnedTwiceGivenBackOnce(Keeping, MockEngine, used=int):
    """A prompt that is pinned again takes its room again, and gives it back once."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        if self.used + query.length > 8192:
            raise RuntimeError("there is no room beside the pinned prefixes")
        self.used += query.length
        return super().genlm_cache_prefix(query)

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.used -= sum(query.length for query in self.pinned)
        super().genlm_clear_kv_cache()

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.used -= sum(query.length for query in self.pinned if query.adapter == adapter)
        return super().genlm_remove_lora(adapter)


@breaks("adapters_are_bound_and_pinned_again_and_again")
class ClearKeepsPins(WorkingEngine):
    """Neither clearing state nor removing an adapter gives a pin back."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        pinned = dict(self.pinned_keys)
        super().genlm_clear_kv_cache()
        self.pinned_keys = pinned

    def forget(self, adapter):
        pinned = dict(self.pinned_keys)
        super().forget(adapter)
        self.pinned_keys = pinned


@breaks("contexts_beside_as_many_pins_as_fit", max_context=1024)
class OldestTokensMakeRoom(MockEngine):
    """Beside pins of more than 8,192 tokens a long context loses its oldest tokens."""

    def row(self, query):
        if not query.cold and sum(pinned.length for pinned in self.pinned) > 8192:
            query = of(query, *query.token_ids[-512:])
        return super().row(query)


@breaks("contexts_beside_as_many_pins_as_fit", max_context=1024)
class PinsMakeRoom(Forgetting, MockEngine, lost=set):
    """The seventeenth pin takes the place of the first, which is still found."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        if len(self.pinned) >= 16 and query not in self.pinned:
            self.lost.add(next(iter(sorted(self.pinned, key=lambda one: one.token_ids))))
        return super().genlm_cache_prefix(query)

    def row(self, query):
        for pinned in () if query.cold else self.lost:
            if (
                query.length > pinned.length
                and query.token_ids[: pinned.length] == pinned.token_ids
            ):
                return super().row(of(query, query.token_ids[-1], *query.token_ids[1:]))
        return super().row(query)


@breaks("many_short_prompts_are_pinned")
class TwentyPins(Forgetting, MockEngine, pins=dict, recent=dict):
    """There are twenty places for pins: a further one takes the first, under the first's tokens. It
    is read there once the state of the last 256 contexts is another's."""

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.pins[query if len(self.pins) < 20 else next(iter(self.pins))] = query
        self.recent[query] = None
        return super().genlm_cache_prefix(query)

    def row(self, query):
        if query.cold or query.length < 2:
            return super().row(query)
        *start, last = query.token_ids
        known = of(query, *start)
        if known in self.pins and known not in self.recent:
            return super().row(of(query, *self.pins[known].token_ids, last))
        self.recent[query] = None
        if len(self.recent) > 256:
            del self.recent[next(iter(self.recent))]
        return super().row(query)


@breaks("pins_end_with_their_adapter")
class PinsAreFreedTwice(Keeping, MockEngine, removed=list, owners=dict, doubled=set):
    """Pins under a removed adapter are freed when it is removed, and again when state is cleared:
    two contexts are given its block."""

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.removed += [query for query in self.pinned if query.adapter == adapter]
        return super().genlm_remove_lora(adapter)

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        self.doubled |= {512 + i for i in range(len(self.removed))}
        self.removed, self.owners = [], {}

    def row(self, query):
        if query.cold or query.length < 3 * BLOCK or not self.doubled:
            return super().row(query)
        start = query.token_ids[: query.length // BLOCK * BLOCK]
        number = self.owners.setdefault((query.adapter, start), 8 * len(self.owners))
        shares = number // 8 % 20 == 19  # The block that is free twice comes last.
        return super().row(of(query, 0, *query.token_ids[1:]) if shares else query)


@breaks("large_temperature_is_flat")
class HotIsOnlyWarm(MockEngine):
    """Temperatures beyond 4 are 4."""

    @hookimpl
    def genlm_sample(self, queries, params):
        warm = [evolve(how, temperature=min(how.temperature, 4.0)) for how in params]
        return super().genlm_sample(queries, warm)


class Refusing(MockEngine):
    """Raises of the options that :meth:`refuses` names."""

    @hookimpl
    def genlm_sample(self, queries, params):
        if any(map(self.refuses, params)):
            raise RuntimeError("probability tensor contains either inf, nan or element < 0")
        return super().genlm_sample(queries, params)


@breaks("tiny_temperature_is_greedy")
class HalfPrecisionTemperature(Refusing):
    """Rows are divided by the temperature in half precision."""

    def refuses(self, how):
        return 0 < how.temperature < 1e-5


@breaks("top_k_beyond_the_vocabulary")
class TopKOfAllRaises(Refusing):
    """``torch.topk`` is asked for more than there is."""

    def refuses(self, how):
        return (how.top_k or 0) > self.vocab_size


class Stopping(MockEngine):
    """Draws with the stop tokens that :meth:`stops` makes of the right ones."""

    @hookimpl
    def genlm_sample(self, queries, params):
        params = [evolve(how, stop_token_ids=self.stops(how.stop_token_ids)) for how in params]
        return super().genlm_sample(queries, params)


@breaks("every_token_stops")
class SixteenStopTokens(Stopping):
    """There is room for sixteen stop tokens."""

    def stops(self, tokens):
        return frozenset(sorted(tokens)[:16])


@breaks("every_token_stops")
class StopTokensOfAByte(Stopping):
    """A table of stop tokens has every thirty-second place free for something else."""

    def stops(self, tokens):
        return frozenset(token for token in tokens if token % 32 != 31)


@breaks("all_tokens_but_one_stop")
class ManyStopTokensAreNone(Stopping):
    """More than 200 stop tokens are taken for a mistake, and none stops."""

    def stops(self, tokens):
        return tokens if len(tokens) <= 200 else frozenset()
