"""Mutants of the mock, written from the bugs of real engines before the suite was looked at.

Each cites the thread that reports the bug. Sizes are those of real engines: blocks of 16 tokens,
chunks of 256, graphs captured for batches of 8, 16, 24, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine
from genlm.core.types import Adapter, Query, SamplingParams

from .common import Forgetting, Mutants

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in

BLOCK = 16
CHUNK = 256


class Blocks(Forgetting, MockEngine, blocks=dict):
    """A correct prefix cache of full blocks, for the mutants below to spoil."""

    def key(self, query: Query) -> Any:
        return 0 if query.adapter is None else query.adapter.version

    def hit(self, query: Query) -> int:
        """How many tokens of the context are known."""
        ids = tuple(query.token_ids)
        known = 0
        while (self.key(query), ids[: known + BLOCK]) in self.blocks and known + BLOCK < len(ids):
            known += BLOCK
        return known

    def keep(self, query: Query) -> None:
        ids = tuple(query.token_ids)
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            self.blocks.setdefault((self.key(query), ids[:end]), query)

    def row(self, query: Query) -> torch.Tensor:
        known = 0 if query.cold else self.hit(query)
        row = self.resumed(query, known) if known else super().row(query)
        self.keep(query)
        return row

    def resumed(self, query: Query, known: int) -> torch.Tensor:
        return MockEngine.row(self, query)

    def of(self, query: Query, ids: Sequence[int]) -> torch.Tensor:
        """The row that state of other tokens gives."""
        return MockEngine.row(self, evolve(query, token_ids=tuple(ids)))


# --- reuse of key/value state -----------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/issues/30931")
class BlocksKeyedByAdapterName(Blocks):
    """An adapter loaded again under its name is served the blocks of the one before."""

    def key(self, query):
        return "" if query.adapter is None else query.adapter.name

    def resumed(self, query, known):
        first = self.blocks[self.key(query), tuple(query.token_ids[:known])]
        return self.of(evolve(query, adapter=first.adapter), query.token_ids)


@seen_in("https://github.com/huggingface/transformers/pull/24653")
class RotaryBaseOfTheCachedKeys(Blocks):
    """Beyond the trained length the rotary base changes; keys in the cache keep the old one."""

    def resumed(self, query, known):
        ids = query.token_ids
        if len(ids) > 512 >= known:
            return self.of(query, (0, *ids))
        return super().resumed(query, known)


@seen_in("https://github.com/vllm-project/vllm-omni/issues/6739")
class ResetIsAStub(Blocks):
    """Clearing the prefix cache logs that it is not supported, and does nothing."""

    @hookimpl
    def genlm_clear_kv_cache(self):
        return None


# --- batches ----------------------------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/issues/15269")
class GraphTooSmall(MockEngine):
    """The largest captured graph holds fewer rows than the batch: the rest are stale."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        if len(rows) % 8 and len(rows) > 48:
            full = len(rows) // 8 * 8
            rows[full:] = rows[: len(rows) - full].clone()
        return rows


@seen_in("https://github.com/sgl-project/sglang/pull/35546")
class SharedOutputBuffer(MockEngine):
    """Every batch is written into one buffer, and the rows handed out are views of it."""

    buffer: torch.Tensor | None = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        if len(rows) > 64:
            return rows
        if self.buffer is None:
            self.buffer = torch.empty(64, self.vocab_size)
        self.buffer[: len(rows)] = rows
        return self.buffer[: len(rows)]


@seen_in("https://github.com/vllm-project/vllm/pull/50283")
class NaNStaysInTheBlock(MockEngine):
    """A request that fails leaves NaN in its block, and the next context there reads it."""

    poisoned = 0

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        try:
            rows = super().genlm_next_token_logprobs(queries)
        except Exception:
            self.poisoned = 1
            raise
        if self.poisoned and not queries[0].cold and len(queries) > 1:
            self.poisoned = 0
            rows[-1] = float("nan")
        return rows


# --- scores -----------------------------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/issues/3251")
class ScoresShiftedByThePrefix(Blocks):
    """The computed length counts as 0 where part is cached: scores are those of other positions."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        known = [self.hit(query) for query in queries]
        scores = super().genlm_sequence_logprobs(queries, continuations)
        return [
            score.roll(1) if hit and len(score) > 1 else score
            for score, hit in zip(scores, known, strict=True)
        ]


@seen_in("https://github.com/sgl-project/sglang/pull/2083")
class ScoresAcrossChunks(MockEngine):
    """A prompt computed in chunks scores the first token of each chunk with the wrong logits."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        for query, score in zip(queries, scores, strict=True):
            at = CHUNK - len(query.token_ids)
            if 1 <= at < len(score):
                score[at] = score[at - 1]
        return scores


# --- sampling ---------------------------------------------------------------------------------


class Weighted(MockEngine):
    """A sampler of its own, right as it stands, for the mutants below to spoil."""

    def weights(self, row: torch.Tensor, params: SamplingParams) -> np.ndarray:
        scaled = row.double().numpy() / params.temperature
        weights = np.exp(scaled - scaled.max())
        weights /= weights.sum()
        order = np.argsort(-weights, kind="stable")
        kept = order[: params.top_k]
        if params.top_p is not None:
            mass = self.cumulated(weights[kept])
            kept = kept[: int(np.searchsorted(mass, params.top_p)) + 1]
        result = np.zeros_like(weights)
        result[kept] = weights[kept]
        return result / result.sum()

    def cumulated(self, weights: np.ndarray) -> np.ndarray:
        return np.cumsum(weights) / weights.sum()

    def numbers(self, params: SamplingParams) -> Any:
        random = np.random.default_rng(params.seed)
        while True:
            yield random.random()

    def stops(self, params: SamplingParams) -> frozenset[int]:
        return params.stop_token_ids

    def _draw(self, query: Query, params: SamplingParams) -> list[int]:
        drawn: list[int] = []
        numbers = self.numbers(params)
        while len(drawn) < params.max_tokens:
            row = self.row(evolve(query, token_ids=(*query.token_ids, *drawn)))
            if params.temperature == 0:
                token_id = int(row.argmax())
            else:
                mass = np.cumsum(self.weights(row, params))
                token_id = int(np.searchsorted(mass, next(numbers) * mass[-1], side="right"))
            if token_id in self.stops(params):
                break
            drawn.append(token_id)
        return drawn


@seen_in("https://github.com/ml-explore/mlx-lm/pull/388")
class NucleusOfWhatWasCut(Weighted):
    """After top-k the masses no longer sum to 1, and top-p counts as if they did."""

    def cumulated(self, weights):
        return np.cumsum(weights)


@seen_in("https://github.com/kekzl/imp/pull/1143")
class EveryTokenTheSameQuantile(Weighted):
    """Consecutive steps get seeds so alike that every token is drawn at the same quantile."""

    def numbers(self, params):
        number = np.random.default_rng(params.seed).random()
        while True:
            yield number


@seen_in("https://github.com/vllm-project/vllm/issues/4589")
class EndTokenAlwaysStops(Weighted):
    """The model's own end token stops a draw although it is not listed."""

    def stops(self, params):
        return params.stop_token_ids | {self.tokenizer.eos_token_id}


@seen_in("https://github.com/vllm-project/vllm/issues/792")
class OnlyOneStopToken(Weighted):
    """Of several stop tokens one stops."""

    def stops(self, params):
        return frozenset(sorted(params.stop_token_ids)[:1])


# --- adapters ---------------------------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm-metal/pull/641")
class ThirdAdapterEvictsTheFirst(MockEngine):
    """More adapters than slots: the weights of the oldest are gone, and its rows are the base's."""

    def row(self, query):
        resident = list(self.adapters)[-2:]
        if query.adapter is not None and query.adapter.version not in resident:
            query = evolve(query, adapter=None)
        return super().row(query)


@seen_in("https://github.com/mflux-community/mflux/issues/629")
class FailedLoadMovesTheOthers(MockEngine):
    """An adapter that cannot be loaded takes the next one's place in the list."""

    failed = 0

    @hookimpl
    def genlm_add_lora(self, adapter):
        if "no-such" in adapter.path:  # the mock takes any
            self.failed += 1
            raise FileNotFoundError(adapter.path)
        return super().genlm_add_lora(adapter)

    def row(self, query):
        if query.adapter is not None and self.failed:
            query = evolve(query, adapter=None)
        return super().row(query)


# --- admission, lifetime, vocabulary ----------------------------------------------------------


@seen_in("https://github.com/sgl-project/sglang/issues/32549")
class NewcomersAlwaysFirst(ContinuousMockEngine):
    """Newcomers are always served before those in flight, who wait as long as newcomers come."""

    genlm_wake = None  # its work is in this process, and no step is cut short

    @hookimpl
    def genlm_step(self, queries):
        if queries and self._in_flight:
            waiting, self._in_flight = self._in_flight, {}
            answers = self.advance(queries)
            self._in_flight = {**waiting, **self._in_flight}
            return answers
        return self.advance(queries)


@seen_in("https://github.com/ml-explore/mlx-lm/issues/1776")
class OneModelClearsTheOther(MockEngine):
    """Two models in one process share state: what one drops is gone in the other."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.adapters = EVERYBODY


EVERYBODY: dict[int, Adapter] = {}


@seen_in("https://github.com/vllm-project/vllm/pull/14326")
class LeaksEveryRow(MockEngine):
    """Entries of the map of requests are never deleted."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        LEAKED.append(self.requests)

    @property
    def requests(self):
        return self.__dict__.setdefault("_requests", [])

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        self.requests.extend(rows.clone())
        return rows


LEAKED: list[list[torch.Tensor]] = []


@seen_in("https://github.com/cactus-compute/cactus/issues/684")
class BytesAboveAsciiAsText(MockEngine):
    """Byte tokens stand for their hexadecimal name instead of the byte."""

    def __init__(self, tokenizer, **options):
        class Wrong(ByteTokenizer):
            def token_bytes(self):
                vocab = list(super().token_bytes())
                return [
                    f"<0x{i:02X}>".encode() if 0x80 <= i < 0x100 else token
                    for i, token in enumerate(vocab)
                ]

        super().__init__(Wrong() if isinstance(tokenizer, ByteTokenizer) else tokenizer, **options)
