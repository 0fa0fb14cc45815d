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
from genlm.core.types import Answer, Query, SampleRequest

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


# --- continuous -----------------------------------------------------------------------------------


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


class RowsOfOneBuffer(ContinuousMockEngine):
    """The rows of a step are views of the buffer that the next step writes."""

    def advance(self, newcomers, dropped=()):
        buffer = self.__dict__.setdefault("buffer", torch.empty(256, self.vocab_size))
        answers = super().advance(newcomers, dropped)
        for i, a in enumerate(answers):
            if isinstance(a.request, Query):
                answers[i] = Answer(a.request, buffer[i].copy_(a.result))
        return answers


class NoSeedIsSeedZero(ContinuousMockEngine):
    def _draw(self, query, params):
        return super()._draw(query, evolve(params, seed=params.seed or 0))


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


SHARED: dict = {}


class SumIsTheKey(Kept):
    def key(self, owner, ids):
        return (owner, len(ids), sum(t * t for t in ids), ids[-1])


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


SOUND = (Kept, KeptInSteps)

#: The faulty engines of this module.
MUTANTS = [
    each
    for each in list(globals().values())
    if isinstance(each, type) and each.__module__ == __name__ and issubclass(each, MockEngine)
    if each not in SOUND
]
