"""Mutants of the mock, written from the bugs of real engines before the suite was looked at.

Each cites the thread that reports the bug. Sizes are those of real engines: blocks of 16 tokens,
chunks of 256, windows of 128, graphs captured for batches of 8, 16, 24, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve

from genlm.core import hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine, hashed_row
from genlm.core.types import Adapter, Query, SamplingParams

from .common import Forgetting, Mutants

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in

BLOCK = 16
CHUNK = 256
WINDOW = 128


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


@seen_in("https://github.com/tenstorrent/vllm/issues/415")
class ResumedAtTheWrongPosition(Blocks):
    """A prompt that resumes from cached blocks computes its rest one position off."""

    def resumed(self, query, known):
        ids = query.token_ids
        return self.of(query, (*ids[:known], 0, *ids[known:]))


@seen_in("https://github.com/vllm-project/vllm/issues/30931")
class BlocksKeyedByAdapterName(Blocks):
    """An adapter loaded again under its name is served the blocks of the one before."""

    def key(self, query):
        return "" if query.adapter is None else query.adapter.name

    def resumed(self, query, known):
        first = self.blocks[self.key(query), tuple(query.token_ids[:known])]
        return self.of(evolve(query, adapter=first.adapter), query.token_ids)


@seen_in("https://github.com/ggml-org/llama.cpp/issues/26207")
class PromptCacheForgetsTheAdapter(Blocks):
    """State computed under one adapter is used for a request that selects another."""

    def key(self, query):
        return None

    def resumed(self, query, known):
        first = self.blocks[None, tuple(query.token_ids[:known])]
        return self.of(evolve(query, adapter=first.adapter), query.token_ids)


@seen_in("https://github.com/yanun0323/Whallm/issues/5")
class SecondTimeBroken(Forgetting, MockEngine, asked=set):
    """Every prompt works once. The second time one token is replayed against the stored state."""

    def row(self, query):
        key = (query.adapter, tuple(query.token_ids))
        if key in self.asked and not query.cold:
            ids = query.token_ids
            return super().row(evolve(query, token_ids=(*ids, ids[-1])))
        self.asked.add(key)
        return super().row(query)


@seen_in("https://github.com/ml-explore/mlx-lm/issues/1494")
class SlidWindowAsPrefix(Forgetting, MockEngine, long=list):
    """A cache whose window has slid is reused for a shorter prefix that it no longer holds."""

    def row(self, query):
        ids = tuple(query.token_ids)
        if not query.cold:
            for other in self.long:
                start = len(other.token_ids) - WINDOW
                longer = tuple(other.token_ids)
                fits = 0 < start < len(ids) < len(longer) and longer[: len(ids)] == ids
                if fits and other.adapter == query.adapter:
                    return super().row(evolve(query, token_ids=ids[start:]))
        if len(ids) > WINDOW:
            self.long = [*self.long[-8:], query]
        return super().row(query)


@seen_in("https://github.com/waybarrios/vllm-mlx/issues/678")
class TrimmedPastTheWindow(Forgetting, MockEngine, last=dict):
    """Trimming a wrapped ring buffer leaves another conversation's keys and values in it."""

    def row(self, query):
        ids, last = tuple(query.token_ids), self.last.get(query.adapter, ())
        shared = 0
        while shared < min(len(ids), len(last)) and ids[shared] == last[shared]:
            shared += 1
        self.last[query.adapter] = ids
        if (
            not query.cold
            and len(last) > WINDOW
            and 0 < shared < len(last) - 8
            and shared < len(ids)
        ):
            return super().row(evolve(query, token_ids=(*last[-8:], *ids)))
        return super().row(query)


@seen_in("https://github.com/vllm-project/vllm/pull/34587")
class StateOfAnUnfinishedBlock(Blocks):
    """A recurrent state is cached at the end of a chunk, under the hash of the whole block."""

    def resumed(self, query, known):
        first = self.blocks[self.key(query), tuple(query.token_ids[:known])]
        ids = query.token_ids
        if known >= 192 and len(first.token_ids) > CHUNK:
            return self.of(query, (*ids[:180], *ids[known:]))
        return super().resumed(query, known)


@seen_in("https://github.com/vllm-project/vllm/issues/55600")
class StateIndexInTheWrongUnit(Blocks):
    """The index of the state to restore counts blocks of another size: long hits restore
    another's."""

    def resumed(self, query, known):
        if known >= 8 * BLOCK:
            ids = query.token_ids
            return self.of(query, (*ids[:BLOCK], *ids[known:]))
        return super().resumed(query, known)


@seen_in("https://github.com/ggml-org/llama.cpp/issues/12253")
class DefragmentedWrongly(Forgetting, MockEngine, cells=dict, moved=set):
    """After many contexts came and went, moving cells together mixes them up, until a restart."""

    def row(self, query):
        ids = tuple(query.token_ids)
        prefix = (query.adapter, ids[:-1])
        if prefix in self.moved and not query.cold:
            return super().row(evolve(query, token_ids=(*ids[::-1],)))
        self.cells[(query.adapter, ids)] = None
        if len(self.cells) > 100:
            self.moved = set(self.cells)
            self.cells.clear()
        return super().row(query)


@seen_in("https://github.com/ggml-org/llama.cpp/issues/7859")
class ScoredTwice(Forgetting, MockEngine, left=dict):
    """Scoring leaves its tokens in the sequence: the next request decodes after them."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        self.left.update(zip(queries, map(tuple, continuations), strict=True))
        return scores

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self._obey(queries)
        rows = []
        for query in queries:
            left = () if query.cold else self.left.pop(query, ())
            rows.append(self.row(evolve(query, token_ids=(*query.token_ids, *left))))
        return torch.stack(rows)


@seen_in("https://github.com/huggingface/transformers/issues/37574")
class RingOverwrittenAtTheWindow(Blocks):
    """The buffer of a window is rolled once too often when a context grows over its size."""

    def resumed(self, query, known):
        ids = query.token_ids
        if len(ids) == WINDOW + 1:
            return self.of(query, ids[1:])
        return super().resumed(query, known)


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


@seen_in("https://github.com/unslothai/unsloth/issues/3699")
class PositionsOfTheLongest(MockEngine):
    """In a padded batch every sequence gets the positions of the longest."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self._obey(queries)
        longest = max(len(query.token_ids) for query in queries)
        return torch.stack(
            [
                self.row(
                    evolve(
                        query,
                        token_ids=(*(0,) * (longest - len(query.token_ids)), *query.token_ids),
                    )
                )
                for query in queries
            ]
        )


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


@seen_in("https://github.com/abetlen/llama-cpp-python/pull/2205")
class LastTokenOfTheFirst(MockEngine):
    """The flag "give logits here" uses the first sequence's length for all sequences."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        self._obey(queries)
        length = len(queries[0].token_ids)
        return torch.stack(
            [self.row(evolve(query, token_ids=query.token_ids[:length])) for query in queries]
        )


@seen_in("https://github.com/ggml-org/llama.cpp/pull/14853")
class OutputsReordered(MockEngine):
    """A batch of more tokens than one micro-batch comes back in the order of the micro-batches."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        rows = super().genlm_next_token_logprobs(queries)
        if sum(len(query.token_ids) for query in queries) > 512:
            order = sorted(range(len(queries)), key=lambda i: len(queries[i].token_ids))
            return rows[torch.tensor(order)]
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


@seen_in("https://github.com/vllm-project/vllm/issues/3066")
class FailedBatchIsKept(MockEngine):
    """After an error inside a step, earlier requests are not aborted and mix with the next call."""

    stale: torch.Tensor | None = None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        try:
            rows = super().genlm_next_token_logprobs(queries)
        except Exception:
            self.stale = self.row(queries[0])
            raise
        if self.stale is not None and len(queries) > 1:
            rows[0], self.stale = self.stale, None
        return rows


# --- scores -----------------------------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/issues/42019")
class StaleScoresOfCachedPositions(Forgetting, MockEngine, known=set):
    """The buffer for scores is not initialised: positions in the prefix cache keep old values."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.buffer = torch.zeros(4096)

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        for query, continuation, score in zip(queries, continuations, scores, strict=True):
            ids = (*query.token_ids, *continuation)
            cached = 0
            while (query.adapter, ids[: cached + BLOCK]) in self.known:
                cached += BLOCK
            stale = max(0, cached - len(query.token_ids))
            score[:stale] = self.buffer[: min(stale, len(score))]
            self.buffer[: len(score)] = score
            self.known.update(
                (query.adapter, ids[:end]) for end in range(BLOCK, len(ids) + 1, BLOCK)
            )
        return scores


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


@seen_in("https://github.com/strands-rl/strands-sglang/issues/34")
class NoScoreAtTheBoundary(Blocks):
    """The first score after a cached context needs logits that were never kept: it is missing."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        whole = [(self.key(query), tuple(query.token_ids)) in self.blocks for query in queries]
        scores = super().genlm_sequence_logprobs(queries, continuations)
        for score, cached in zip(scores, whole, strict=True):
            if cached:
                score[0] = 0.0
        return scores


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


@seen_in("https://github.com/vllm-project/vllm/issues/51226")
class SeedNeedsSeededNeighbours(MockEngine):
    """A seed is ignored when another request of the batch has none."""

    @hookimpl
    def genlm_sample(self, queries, params):
        if any(how.seed is None for how in params):
            params = [evolve(how, seed=None) for how in params]
        return super().genlm_sample(queries, params)


@seen_in("https://github.com/sgl-project/sglang/pull/35697")
class NeighboursFilterMovesTheDraw(MockEngine):
    """One request with top-k or top-p sends every seeded row of the batch through another path."""

    @hookimpl
    def genlm_sample(self, queries, params):
        if any(how.top_k or how.top_p for how in params):
            params = [how if how.seed is None else evolve(how, seed=how.seed + 1) for how in params]
        return super().genlm_sample(queries, params)


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


@seen_in("https://github.com/Blaizzy/mlx-vlm/pull/2029")
class TopKFirstThenTemperature(Weighted):
    """Top-p is decided before the temperature is applied."""

    def weights(self, row, params):
        cut = super().weights(row, evolve(params, temperature=1.0))
        with np.errstate(divide="ignore"):
            scaled = np.log(cut) / params.temperature
        weights = np.exp(scaled - scaled.max())
        return weights / weights.sum()


@seen_in("https://github.com/kekzl/imp/pull/1143")
class EveryTokenTheSameQuantile(Weighted):
    """Consecutive steps get seeds so alike that every token is drawn at the same quantile."""

    def numbers(self, params):
        number = np.random.default_rng(params.seed).random()
        while True:
            yield number


@seen_in("https://github.com/abetlen/llama-cpp-python/issues/1154")
class NoTopKIsGreedy(Weighted):
    """Top-k switched off means top-k of 1 where another filter is set."""

    def weights(self, row, params):
        if params.top_k is None and params.top_p is not None:
            params = evolve(params, top_k=1)
        return super().weights(row, params)


@seen_in("https://github.com/turboderp-org/exllamav2/issues/186")
class OneNumberForTheBatch(Weighted):
    """Equal prompts in one batch share their random numbers."""

    @hookimpl
    def genlm_sample(self, queries, params):
        shared = int(np.random.default_rng().integers(1 << 40))
        params = [evolve(how, seed=shared) if how.seed is None else how for how in params]
        return super().genlm_sample(queries, params)


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


@seen_in("https://github.com/vllm-project/vllm/issues/2538")
class StopTokenInTheOutput(Weighted):
    """A stop token other than the model's end token stays in the output."""

    def _draw(self, query, params):
        drawn = super()._draw(query, params)
        if len(drawn) < params.max_tokens and len(params.stop_token_ids) > 1:
            row = self.row(evolve(query, token_ids=(*query.token_ids, *drawn)))
            drawn.append(max(params.stop_token_ids, key=lambda token_id: float(row[token_id])))
        return drawn


@seen_in("https://github.com/sgl-project/sglang/pull/33206")
class NotANumberDrawsAnything(Weighted):
    """Scaling overflows at low temperatures; a row of NaN becomes uniform, and anything is
    drawn."""

    def weights(self, row, params):
        if params.temperature < 0.05:
            return np.full(len(row), 1 / len(row))
        return super().weights(row, params)


# --- adapters ---------------------------------------------------------------------------------


@seen_in("https://github.com/sgl-project/sglang/pull/18208")
class UnloadedButStillThere(MockEngine):
    """Removing an adapter does not restore the base model."""

    removed: Adapter | None = None

    def row(self, query):
        if query.adapter is None and self.removed is not None:
            mixed = super().row(query).exp() * 0.99
            mixed += 0.01 * hashed_row(query.token_ids, self.removed, self.vocab_size).exp()
            return mixed.log()
        return super().row(query)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        self.removed = adapter
        return super().genlm_remove_lora(adapter)


@seen_in("https://github.com/huggingface/peft/pull/1990")
class BaseTakesTheLastSlot(MockEngine):
    """In a mixed batch the rows without adapter take the slot of the last adapter loaded."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        used = [query.adapter for query in queries if query.adapter is not None]
        if used:
            queries = [
                query if query.adapter is not None else evolve(query, adapter=used[-1])
                for query in queries
            ]
        return super().genlm_next_token_logprobs(queries)


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


@seen_in("https://github.com/vllm-project/vllm/issues/35541")
class TooBigToEverFit(ContinuousMockEngine):
    """A request that never fits the pool is tried again for ever, and nothing is said."""

    @hookimpl
    def genlm_step(self, queries):
        answers = self.advance([query for query in queries if len(query.token_ids) <= 700])
        return answers


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


@seen_in("https://github.com/raullenchai/Rapid-MLX/pull/1810")
class ErrorRetriedForEver(ContinuousMockEngine):
    """An error in a step is logged, and the same batch is tried again, for ever."""

    @hookimpl
    def genlm_step(self, queries):
        before = {**self._in_flight, **dict.fromkeys(queries, self._steps)}
        try:
            return self.advance(queries)
        except RuntimeError:
            self._in_flight = before
            return []


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
