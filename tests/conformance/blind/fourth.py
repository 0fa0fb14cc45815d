"""What an author of a backend may get wrong, written from the hooks and the mock alone: engines
without state, engines with steps, and engines that keep the state of a small network."""

from __future__ import annotations

import math
import threading
import zlib

import numpy as np
import torch
from attrs import evolve

from genlm.core.hookspecs import hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine
from genlm.core.sampling import TokenDrawer
from genlm.core.types import Answer, Query, SampleRequest, ScoreRequest, query_of

# --- simple ---------------------------------------------------------------------------------------


class SortedAndNotPutBack(MockEngine):
    """Sorts a large batch by length for padding, and forgets to put rows back."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        order = sorted(queries, key=lambda q: -q.length) if len(queries) > 4 else queries
        return torch.stack([self.row(q) for q in order])


class OncePerTokens(MockEngine):
    """Computes equal contexts of a batch once, whatever their adapters."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        known = {}
        return torch.stack([known.setdefault(q.token_ids, self.row(q)) for q in queries])


class NucleusBeforeTemperature(MockEngine):
    def _draw(self, query, params):
        if params.top_p is None or params.temperature in (0, 1):
            return super()._draw(query, params)
        random, drawn = np.random.default_rng(params.seed), []
        while len(drawn) < params.max_tokens:
            row = self.row(query.extended(tuple(drawn))).double()
            order = row.argsort(descending=True)[: params.top_k]
            mass = row[order].softmax(0).cumsum(0)
            order = order[: int((mass < params.top_p).sum()) + 1]
            p = (row[order] / params.temperature).softmax(0).numpy()
            token = int(order[random.choice(len(p), p=p / p.sum())])
            if token in params.stop_token_ids:
                break
            drawn.append(token)
        return drawn


class OneTooManyInTopK(MockEngine):
    def _draw(self, query, params):
        k = params.top_k
        return super()._draw(query, evolve(params, top_k=k + 1 if k is not None and k > 1 else k))


class SeedAndPlaceInTheBatch(MockEngine):
    """One generator for a batch: the second draw continues the numbers of the first."""

    @hookimpl
    def genlm_sample(self, queries, params):
        return [
            self._draw(q, p if p.seed is None or i == 0 else evolve(p, seed=p.seed + i))
            for i, (q, p) in enumerate(zip(queries, params, strict=True))
        ]


class OwnEndStopsToo(MockEngine):
    def _draw(self, query, params):
        return super()._draw(query, evolve(params, stop_token_ids=params.stop_token_ids | {257}))


class StopTokenKept(MockEngine):
    """The stop token stays in the result where the continuation ended at its very last place."""

    def _draw(self, query, params):
        drawn = super()._draw(query, evolve(params, stop_token_ids=frozenset()))
        for i, token in enumerate(drawn):
            if token in params.stop_token_ids:
                return drawn[: i + 1] if i + 1 == params.max_tokens else drawn[:i]
        return drawn


class ScoresInChunks(MockEngine):
    """The first token of each later chunk of 32 is scored from one token too few."""

    def _score(self, query, continuation):
        scores = super()._score(query, continuation)
        for i in range(32, len(continuation), 32):
            scores[i] = self.row(query.extended(tuple(continuation[: i - 1])))[continuation[i]]
        return scores


class BatchesInHalf(MockEngine):
    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = torch.stack([self.row(q) for q in queries])
        return rows.bfloat16().float().log_softmax(-1) if len(queries) > 2 else rows


class OneBuffer(MockEngine):
    """Rows are written into one buffer for all calls."""

    buffer = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        if self.buffer is None:
            self.buffer = torch.empty(1024, self.vocab_size)
        out = self.buffer[: len(queries)]
        for place, query in zip(out, queries, strict=True):
            place.copy_(self.row(query))
        return out


class AdaptersByName(MockEngine):
    """Weights by name: what is bound again goes with the old one, and then the base answers."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.paths = {}

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.paths[adapter.name] = adapter.path
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.paths.pop(adapter.name, None)
        return super().genlm_remove_lora(adapter)

    def row(self, query):
        if query.adapter is not None and query.adapter.name not in self.paths:
            query = Query(query.token_ids)
        return super().row(query)


class PinnedForAll(MockEngine):
    """A pinned prefix serves every adapter: the state is that of who pinned it."""

    def row(self, query):
        if not query.cold:
            for pinned in self.pinned:
                n = pinned.length
                if n < query.length and query.token_ids[:n] == pinned.token_ids:
                    return super().row(Query(query.token_ids, pinned.adapter))
        return super().row(query)


class GreedyOfTheFirst(MockEngine):
    """Temperature, like all parameters, of the first request is taken for the call."""

    @hookimpl
    def genlm_sample(self, queries, params):
        return [
            self._draw(q, evolve(p, temperature=params[0].temperature))
            for q, p in zip(queries, params, strict=True)
        ]


# --- continuous -----------------------------------------------------------------------------------


class DropsRowsOnly(ContinuousMockEngine):
    """Draws whose callers have gone are computed to the end, and answered."""

    def advance(self, newcomers, dropped=()):
        return super().advance(newcomers, [r for r in dropped if isinstance(r, Query)])


class EqualDrawsAreOne(ContinuousMockEngine):
    """Equal unseeded draws in flight share one result."""

    def advance(self, newcomers, dropped=()):
        answers, known = super().advance(newcomers, dropped), {}
        for a in answers:
            if isinstance(a.request, SampleRequest):
                known.setdefault((a.request.query, a.request.params), a.result)
        return [
            Answer(a.request, list(known[a.request.query, a.request.params]))
            if isinstance(a.request, SampleRequest)
            else a
            for a in answers
        ]


class OneGeneratorASlot(ContinuousMockEngine):
    """A seed counts when its slot is first used; the next draw there goes on with the numbers."""

    def _draw(self, query, params):
        if params.seed is None:
            return super()._draw(query, params)
        self.__dict__.setdefault("drawers", {})
        drawer = self.drawers.setdefault(params.seed, TokenDrawer(params))
        drawer._params = params
        drawn = []
        while len(drawn) < params.max_tokens:
            token = drawer.draw(self.row(query.extended(tuple(drawn))))
            if token in params.stop_token_ids:
                break
            drawn.append(token)
        return drawn


class KeepsWhatItRaisedOn(ContinuousMockEngine):
    """No room for more than six: it raises, and what is in flight stays there."""

    def advance(self, newcomers, dropped=()):
        if len(self._in_flight) + len(newcomers) > 6 and newcomers:
            self._in_flight.update({r: self._steps_of(r) for r in newcomers[:2]})
            raise RuntimeError("out of blocks")
        return super().advance(newcomers, dropped)


class WakeTakesTheLock(ContinuousMockEngine):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.lock = threading.Lock()

    @hookimpl
    def genlm_wake(self):
        with self.lock:
            super().genlm_wake()

    def advance(self, newcomers, dropped=()):
        with self.lock:
            return super().advance(newcomers, dropped)


class ScoresByContext(ContinuousMockEngine):
    """Scores of one context in flight together are answered with those of the first."""

    def advance(self, newcomers, dropped=()):
        answers, known = super().advance(newcomers, dropped), {}
        for i, a in enumerate(answers):
            if isinstance(a.request, ScoreRequest):
                key = (a.request.query, len(a.request.continuation))
                answers[i] = Answer(a.request, known.setdefault(key, a.result))
        return answers


class AtMost32Tokens(ContinuousMockEngine):
    def _draw(self, query, params):
        return super()._draw(query, evolve(params, max_tokens=min(params.max_tokens, 32)))


class OneAdapterAStep(ContinuousMockEngine):
    """All that finishes in a step gets the adapter of the first."""

    def advance(self, newcomers, dropped=()):
        answers = super().advance(newcomers, dropped)
        if answers:
            first = query_of(answers[0].request).adapter
            answers = [
                Answer(a.request, self.row(Query(a.request.token_ids, first)))
                if isinstance(a.request, Query)
                else a
                for a in answers
            ]
        return answers


class MemoOfTheEnd(ContinuousMockEngine):
    """Rows are remembered by length and the last 64 tokens; a cold query is nothing special."""

    def row(self, query):
        memo = self.__dict__.setdefault("memo", {})
        version = query.adapter.version if query.adapter else 0
        key = (version, query.length, query.token_ids[-64:])
        if key not in memo:
            memo[key] = super().row(query)
        return memo[key].clone()


class NewestFirst(ContinuousMockEngine):
    """Two places, and who came last is first."""

    def advance(self, newcomers, dropped=()):
        for request in dropped:
            self._in_flight.pop(request, None)
        self._in_flight.update({request: self._steps_of(request) for request in newcomers})
        working = list(self._in_flight)[-2:]
        for request in working:
            self._in_flight[request] -= 1
        done = [r for r in working if self._in_flight[r] <= 0]
        for request in done:
            del self._in_flight[request]
        return [Answer(r, self._result(r)) for r in done]


class RowsOfOneBuffer(ContinuousMockEngine):
    """The rows of a step are views of the buffer that the next step writes."""

    def advance(self, newcomers, dropped=()):
        buffer = self.__dict__.setdefault("buffer", torch.empty(256, self.vocab_size))
        answers = super().advance(newcomers, dropped)
        for i, a in enumerate(answers):
            if isinstance(a.request, Query):
                answers[i] = Answer(a.request, buffer[i].copy_(a.result))
        return answers


class OneStopToken(ContinuousMockEngine):
    def _draw(self, query, params):
        return super()._draw(
            query, evolve(params, stop_token_ids=frozenset(sorted(params.stop_token_ids)[:1]))
        )


class NoSeedIsSeedZero(ContinuousMockEngine):
    def _draw(self, query, params):
        return super()._draw(query, evolve(params, seed=params.seed or 0))


class DeclinesInTheMiddle(ContinuousMockEngine):
    """A draw with top_p is given back as what has been drawn so far, not declined."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        return drawn[: len(drawn) // 2] if params.top_p and len(drawn) > 3 else drawn


class PlaceholderForADrop(ContinuousMockEngine):
    """What is dropped in the step in which it would have ended takes its neighbour with it."""

    def advance(self, newcomers, dropped=()):
        answers = super().advance(newcomers, dropped)
        return answers[: len(answers) - 1] if dropped and len(answers) > 1 else answers


# --- with real state ------------------------------------------------------------------------------

WIDTH, LAYERS = 24, 2


class Net:
    def __init__(self, vocab, seed=0):
        g = torch.Generator().manual_seed(seed)

        def w(*shape):
            return torch.randn(*shape, generator=g) / math.sqrt(shape[-1])

        self.embed = torch.randn(vocab, WIDTH, generator=g)
        self.layers = [[w(WIDTH, WIDTH) for _ in range(4)] for _ in range(LAYERS)]
        self.out = w(vocab, WIDTH) * 3

    def __call__(self, ids, past, lora=None, start=None):
        """Hidden state of the new tokens, and keys and values with theirs."""
        start = past[0][0].shape[0] if start is None else start
        places = torch.arange(start, start + len(ids))
        wave = places[:, None] / 30 ** (torch.arange(WIDTH) / WIDTH)
        x = self.embed[list(ids)] + 0.5 * wave.sin()
        state = []
        for (q, k, v, o), (keys, values) in zip(self.layers, past, strict=True):
            h = x / x.norm(dim=-1, keepdim=True) * math.sqrt(WIDTH)
            new_v = h @ v.T if lora is None else h @ (v + lora).T
            keys, values = torch.cat([keys, h @ k.T]), torch.cat([values, new_v])
            scores = (h @ q.T) @ keys.T / math.sqrt(WIDTH)
            scores = scores - 0.01 * (places[:, None] - torch.arange(len(keys))[None]).clamp(min=0)
            n, m = scores.shape
            future = torch.arange(m)[None] > (m - n + torch.arange(n))[:, None]
            x = x + 2 * scores.masked_fill(future, -torch.inf).softmax(-1) @ values
            x = x + torch.tanh(x @ o.T)
            state.append((keys, values))
        return x, state

    def row(self, x):
        return (x[-1] / x[-1].norm() * math.sqrt(WIDTH) @ self.out.T).log_softmax(-1)


EMPTY = [(torch.zeros(0, WIDTH), torch.zeros(0, WIDTH))] * LAYERS


def cut(state, n):
    return [(k[:n], v[:n]) for k, v in state]


class Kept(MockEngine):
    """A sound engine over a small network that keeps keys and values by blocks of 16 tokens."""

    reference = False  # its rows are not the mock's
    block = 16
    room = 4096  # blocks

    def __init__(self, tokenizer, **options):
        options.setdefault("max_context", 1024)
        super().__init__(tokenizer, **options)
        self.net = Net(self.vocab_size)
        self.loras = {}
        self.store = {}  # from the key of a beginning to its state

    def lora(self, adapter):
        return None if adapter is None else self.loras[self.owner(adapter)]

    def owner(self, adapter):
        return 0 if adapter is None else adapter.version

    def key(self, owner, ids):
        return (owner, ids)

    @hookimpl
    def genlm_add_lora(self, adapter):
        g = torch.Generator().manual_seed(zlib.crc32(adapter.path.encode()))
        self.loras[self.owner(adapter)] = 0.2 * torch.randn(WIDTH, WIDTH, generator=g)
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.loras.pop(self.owner(adapter), None)
        for key in [k for k in self.store if k[0] == self.owner(adapter)]:
            del self.store[key]
        return super().genlm_remove_lora(adapter)

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.store.clear()
        super().genlm_clear_kv_cache()

    @hookimpl
    def genlm_cache_prefix(self, query):
        self.row(query)
        return super().genlm_cache_prefix(query)

    def find(self, owner, ids):
        """The longest state kept, of at most all tokens but one."""
        for n in range((len(ids) - 1) // self.block * self.block, 0, -self.block):
            state = self.store.get(self.key(owner, ids[:n]))
            if state is not None:
                return state, n
        return EMPTY, 0

    def keep(self, owner, ids, state):
        for n in range(self.block, len(ids) + 1, self.block):
            self.store.setdefault(self.key(owner, ids[:n]), cut(state, n))
        while len(self.store) > self.room:
            del self.store[next(iter(self.store))]

    def forward(self, ids, past, lora):
        return self.net(ids, past, lora)

    def row(self, query):
        owner, ids = self.owner(query.adapter), query.token_ids
        past, n = (EMPTY, 0) if query.cold else self.find(owner, ids)
        x, state = self.forward(ids[n:], past, self.lora(query.adapter))
        if not query.cold:
            self.keep(owner, ids, state)
        return self.net.row(x)


class KeptInSteps(Kept, ContinuousMockEngine):
    """The same, in steps."""


class BlockByItself(Kept):
    """A block's key is its own tokens and its place: not what comes before it."""

    def key(self, owner, ids):
        return (owner, len(ids), ids[-self.block :])


class StateForAllAdapters(Kept):
    def key(self, owner, ids):
        return (0, ids)


class StateByName(Kept):
    """State by the adapter's name, and dropped when the name is free; not when bound again."""

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.loras.pop(adapter.version, None)
        return MockEngine.genlm_remove_lora(self, adapter)

    def row(self, query):
        self.name = query.adapter.name if query.adapter else None
        return super().row(query)

    def key(self, owner, ids):
        return (self.name, ids)


class AppendedInPlace(Kept):
    """Room for growth behind a kept state is shared: two continuations write the same place."""

    def keep(self, owner, ids, state):
        full = len(ids) // self.block * self.block
        if full:
            key = self.key(owner, ids[:full])
            old = self.store.get(key)
            if old is None:
                self.store[key] = cut(state, full)
            elif len(ids) > full + 2:  # written over the end of what others read
                for (k, v), (k2, v2) in zip(old, state, strict=True):
                    k[-1:] = k2[full : full + 1]
                    v[-1:] = v2[full : full + 1]


class HalfPrecisionKept(Kept):
    def keep(self, owner, ids, state):
        super().keep(owner, ids, [(k.half().float(), v.half().float()) for k, v in state])


class BrainFloatKept(Kept):
    def keep(self, owner, ids, state):
        super().keep(owner, ids, [(k.bfloat16().float(), v.bfloat16().float()) for k, v in state])


class HoleInTheMiddle(Kept):
    """Counts the blocks that it has, though some in between have been evicted."""

    room = 24

    def keep(self, owner, ids, state):
        for n in range(self.block, len(ids) + 1, self.block):
            one = [(k[n - self.block : n], v[n - self.block : n]) for k, v in state]
            self.store.setdefault(self.key(owner, ids[:n]), one)
        while len(self.store) > self.room:
            del self.store[next(iter(self.store))]

    def find(self, owner, ids):
        ends = range(self.block, len(ids), self.block)
        found = [b for n in ends if (b := self.store.get(self.key(owner, ids[:n]))) is not None]
        if not found:
            return EMPTY, 0
        joined = [tuple(torch.cat([b[i][j] for b in found]) for j in (0, 1)) for i in range(LAYERS)]
        return joined, len(found) * self.block


class LastPlaceTwice(Kept):
    """A context all of whose blocks are kept computes its last token again, one place too far."""

    def row(self, query):
        ids, owner = query.token_ids, self.owner(query.adapter)
        whole = (
            None if query.cold or len(ids) % self.block else self.store.get(self.key(owner, ids))
        )
        if whole is None:
            return super().row(query)
        lora = self.lora(query.adapter)
        x, _ = self.net(ids[-1:], cut(whole, len(ids) - 1), lora, start=len(ids))
        return self.net.row(x)


class LastOfAChunk(Kept):
    """Long prompts in chunks of 96; a rest of one token is lost."""

    def forward(self, ids, past, lora):
        for start in range(0, max(len(ids) - 1, 1), 96):
            x, past = self.net(ids[start : start + 96], past, lora)
        return x, past


class PaddingIsRead(Kept):
    """In a batch of very different lengths the short ones read two tokens of padding."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        longest = max(q.length for q in queries)
        return torch.stack(
            [
                self.row(Query((0, 0, *q.token_ids), q.adapter))
                if longest - q.length > 40
                else self.row(q)
                for q in queries
            ]
        )


class PinsPointOn(Kept):
    """Places of pinned prefixes stay known after all is cleared, and are given to others."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.pins, self.places = {}, []

    @hookimpl
    def genlm_cache_prefix(self, query):
        _, state = self.net(query.token_ids, EMPTY, self.lora(query.adapter))
        self.pins[self.owner(query.adapter), query.token_ids] = len(self.places)
        self.places.append(state)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self):
        self.places.clear()
        super().genlm_clear_kv_cache()

    def find(self, owner, ids):
        for (who, pin), place in self.pins.items():
            n = len(pin)
            if who == owner and n < len(ids) and ids[:n] == pin and place < len(self.places):
                return cut(self.places[place], n), self.places[place][0][0][:n].shape[0]
        return super().find(owner, ids)


SHARED: dict = {}


class OneStoreForAllModels(Kept):
    """The store is the module's, and a model's adapters are called 1, 2, 3."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.store = SHARED


class SumIsTheKey(Kept):
    def key(self, owner, ids):
        return (owner, len(ids), sum(t * t for t in ids), ids[-1])


class FirstScoreOfKept(KeptInSteps):
    """Where a context is kept to its end, its continuation's first token is scored one early."""

    def _score(self, query, continuation):
        scores = super()._score(query, continuation)
        if query.length > self.block and query.length % self.block == 0:
            scores[0] = self.row(Query(query.token_ids[:-1], query.adapter))[continuation[0]]
        return scores


class DrawsForgetTheAdapter(KeptInSteps):
    """What a draw leaves is kept as the base model's."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        ids = query.extended(tuple(drawn)).token_ids
        _, state = self.net(ids, EMPTY, self.lora(query.adapter))
        if query.adapter is not None:
            self.keep(0, ids, state)
        return drawn


class ClearForgetsAdapters(Kept):
    """To clear the state lays the base model's weights anew, and adapters with them."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        super().genlm_clear_kv_cache()
        self.loras = {version: torch.zeros(WIDTH, WIDTH) for version in self.loras}


class WindowOfTheKept(Kept):
    """Kept state longer than 256 tokens is cut to its last 256, at their old places."""

    def find(self, owner, ids):
        state, n = super().find(owner, ids)
        return ([(k[-256:], v[-256:]) for k, v in state], n) if n > 256 else (state, n)


SOUND = (Kept, KeptInSteps)

#: The faulty engines of this module.
MUTANTS = [
    each
    for each in list(globals().values())
    if isinstance(each, type) and each.__module__ == __name__ and issubclass(each, MockEngine)
    if each not in SOUND
]
