"""Mutants of a tiny real model behind ``genlm-hf``: what breaks where requests meet. Written before
the clauses on schedules.

Each cites a thread that reports the bug, or one of its kind. Most take hold of the engine's hooks
and of the torch module; those of growing tables need its pool and its store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve

from genlm.core import Answer, Query, hookimpl
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from genlm.kit.kv.commands import Copy
from genlm.kit.segments import Trunk
from tests.engines import add_lora

from .common import Forgetting, Keeping, Mutants
from .of_a_real_model import Positions

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in


class Steps(HFEngine):
    """Has requests of its own in the engine: other ones, later ones, fewer ones.

    Long prompts come in chunks of 256 tokens.
    """

    def __init__(self, model: Any, tokenizer: Any, options: HFOptions | None = None) -> None:
        options = evolve(options or HFOptions(), max_batch_tokens=256)
        super().__init__(model, tokenizer, options)
        self.asked: dict[Query, list[Query]] = {}  # what the engine was asked, and for whom

    @hookimpl
    def genlm_step(self, queries: Sequence[Query], dropped: Sequence[Query]) -> list[Answer]:
        if queries and queries[0].cold:
            return super().genlm_step(queries, dropped)
        gone = self.let_go(list(dropped))
        given = self.given(list(queries), list(dropped))
        for query, instead in given:
            self.asked.setdefault(instead, []).append(query)
        fresh = [instead for query, instead in given if self.asked[instead][0] is query]
        try:
            answers = super().genlm_step(list(dict.fromkeys(fresh)), gone)
        except BaseException:
            self.asked.clear()
            self.lost()
            raise
        return [
            Answer(query, answer.result.clone())
            for answer in answers
            for query in self.asked.pop(answer.request, [])
        ]

    def let_go(self, dropped: list[Query]) -> list[Query]:
        gone = []
        for query in dropped:
            for instead, whom in list(self.asked.items()):
                if query in whom:
                    whom.remove(query)
                    if not whom:
                        del self.asked[instead]
                        gone.append(instead)
        return gone

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        """The newcomers that the engine gets, and what it is asked in place of each."""
        return [(query, self.instead(query)) for query in queries]

    def instead(self, query: Query) -> Query:
        return query

    def lost(self) -> None:
        """The engine has dropped everything."""

    def begun(self, query: Query) -> bool:
        """Whether the beginning of a context has been computed, and not all of it."""
        begun = self._schedule._begun
        return begun is not None and begun[0] == query

    @hookimpl
    def genlm_close(self) -> None:
        self.asked.clear()
        super().genlm_close()


class Waiting(Keeping, Steps, waiting=list):
    """Has places for some requests; the others wait."""

    places = 8

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        waiting = [query for query in self.waiting if query not in dropped]
        queue = self.queue(waiting, queries)
        free = max(self.places - len(self.asked), 0)
        self.waiting = queue[free:]
        return super().given(queue[:free], dropped)

    def queue(self, waiting: list[Query], newcomers: list[Query]) -> list[Query]:
        return waiting + newcomers

    def lost(self) -> None:
        self.waiting.clear()


# --- requests that are cancelled --------------------------------------------------------------


@seen_in("https://github.com/sgl-project/sglang-jax/pull/1008")
class ProgressOfADroppedPrompt(Steps):
    """A newcomer begins with what was computed of a prompt that is dropped in that step."""

    left: tuple[int, ...] | None = None

    def let_go(self, dropped):
        for query in dropped:
            if self.begun(query):
                self.left = query.token_ids[:16]
        return super().let_go(dropped)

    def given(self, queries, dropped):
        given = super().given(queries, dropped)
        if self.left is not None and queries:
            query, left, self.left = queries[0], self.left, None
            if query.length > len(left):
                given[0] = query, evolve(query, token_ids=(*left, *query.token_ids[len(left) :]))
        return given


@seen_in("https://github.com/raullenchai/Rapid-MLX/issues/1759")
class PlaceLeaksWithADroppedRow(Waiting):
    """Of 64 places each dropped request keeps one for ever."""

    places = 64

    def given(self, queries, dropped):
        self.places -= sum(query not in self.waiting for query in dropped)
        return super().given(queries, dropped)


# --- whose turn it is -------------------------------------------------------------------------


@seen_in("https://github.com/sgl-project/sglang/issues/32549")
class EightShortestRun(Waiting):
    """In every step the eight shortest run."""

    def queue(self, waiting, newcomers):
        return sorted(waiting + newcomers, key=lambda query: query.length)


@seen_in("https://github.com/ggml-org/llama.cpp/issues/15008")
class DeferredBehindNewcomers(Waiting):
    """Of eight places, one that is free goes to a newcomer before those who wait."""

    def queue(self, waiting, newcomers):
        return newcomers + waiting


# --- requests in flight together --------------------------------------------------------------


@seen_in("https://github.com/tenstorrent/vllm/issues/415")
class PositionsOneOffInCompany(Positions):
    """Tokens from position 256 on get positions one too high, where others run beside them."""

    def changed(self, positions):
        resumed = bool(positions.flatten()[0] > 0)
        if positions.shape[0] > 1 and (resumed or bool((positions.flatten().diff() > 1).any())):
            return positions + (positions >= 256)
        return positions


# --- state that grows and moves ---------------------------------------------------------------


class Pooled(HFEngine):
    """Calls :meth:`spoil` with the pool and the planner, once the model stands."""

    budget: int | None = None

    def __init__(self, model: Any, tokenizer: Any, options: HFOptions | None = None) -> None:
        options = options or HFOptions()
        if self.budget is not None:
            options = evolve(options, kv_cache_bytes=self.budget)
        super().__init__(model, tokenizer, options)
        self.spoil(self._runner.pool, self._strategy.planner)

    def spoil(self, pool: Any, planner: Any) -> None:
        raise NotImplementedError


class Resized(Pooled):
    """Calls :meth:`moved` when the tables have grown, with how many rows were kept."""

    def spoil(self, pool: Any, planner: Any) -> None:
        resize = pool.resize

        def and_moved(rows: int, columns: int, kept: Sequence[int] = ()) -> None:
            resize(rows, columns, kept)
            with torch.inference_mode():
                if kept:
                    self.moved(pool, planner, len(kept))

        pool.resize = and_moved

    def moved(self, pool: Any, planner: Any, rows: int) -> None:
        raise NotImplementedError


@seen_in("https://github.com/ml-explore/mlx-lm/pull/1141")
class RowsBeyond64AreNotMoved(Resized):
    """When the tables grow, 64 rows are copied."""

    def moved(self, pool, planner, rows):
        for layer in pool.layers:
            layer.keys[64:] = 0
            layer.values[64:] = 0


@seen_in("https://github.com/ggml-org/llama.cpp/issues/12253")
class PinnedAreNotMoved(Resized):
    """When the tables grow, the rows move up; what is pinned stays where it was."""

    def moved(self, pool, planner, rows):
        for one in planner.tree.kept:
            for keys, values in one.layers if one.pinned and hasattr(one, "layers") else ():
                keys.copy_(keys.roll(1, 2)), values.copy_(values.roll(1, 2))


@seen_in("https://github.com/ml-explore/mlx-lm/pull/1000")
class ForksCopy128Columns(Pooled):
    """A fork copies 128 columns of its parent's row."""

    def spoil(self, pool, planner):
        fork = pool.fork
        pool.fork = lambda sources, targets, columns: fork(sources, targets, min(columns, 128))


@seen_in("https://github.com/strands-rl/strands-sglang/issues/34")
class TrunkWithoutItsLastColumn(Pooled):
    """Where several rows stand on a long beginning, its last position is not copied."""

    def spoil(self, pool, planner):
        table = planner._table
        do = table.do

        def all_but_one(command):
            do(command)
            if isinstance(command, Copy) and isinstance(command.target, Trunk):
                with torch.inference_mode():
                    for keys, values in command.target.layers if command.size >= 200 else ():
                        keys[0, :, command.size - 1] = 0
                        values[0, :, command.size - 1] = 0

        table.do = all_but_one


@seen_in("https://github.com/waybarrios/vllm-mlx/pull/353")
class RestOfARowOneOff(Pooled):
    """Where a long beginning is taken out of a row, the rest moves one column too far."""

    def spoil(self, pool, planner):
        shift = pool.shift

        def too_far(slot, columns):
            begin = columns.start + (columns.start >= 128)
            shift(slot, slice(begin, columns.stop))

        pool.shift = too_far


@seen_in("https://github.com/vllm-project/vllm/issues/54839")
class PinsOfRemovedAdaptersStay(Pooled):
    """Removing an adapter leaves its pinned contexts in memory."""

    budget = 2 << 20  # 8,192 positions

    def spoil(self, pool, planner):
        tree, drop_adapter, drop = planner.tree, planner.drop_adapter, planner.tree.drop

        def all_but_pinned(version):
            tree.drop = lambda one: one.pinned or drop(one)
            try:
                drop_adapter(version)
            finally:
                tree.drop = drop

        planner.drop_adapter = all_but_pinned


@seen_in("https://github.com/openvinotoolkit/model_server/issues/4428")
class RowsOfARemovedAdapterAreFreeTwice(Pooled):
    """The rows of a removed adapter are given out twice."""

    def spoil(self, pool, planner):
        tree, drop = planner.tree, planner.drop_adapter

        def twice(version):
            before = set(tree._free)
            drop(version)
            freed = [slot for slot in tree._free if slot not in before]
            tree._free = sorted([*tree._free, *freed[:1]])

        planner.drop_adapter = twice


# --- long continuations, long contexts --------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/pull/29216")
class ScoresFromAHundredOn(HFEngine):
    """From position 100 of a continuation on, the score is that of the token before."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        scores = super().genlm_sequence_logprobs(queries, continuations)
        return [
            torch.cat([score[:100], score[99:-1]]) if len(score) > 100 else score
            for score in scores
        ]


@seen_in("https://github.com/kvcache-ai/ktransformers/issues/73")
class PositionsEndAt512(Positions):
    """Positions are clamped to 511, in cold rows too."""

    def changed(self, positions):
        return positions.clamp(max=511)


# --- adapters ---------------------------------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/issues/42633")
class NameOfARemovedAdapter(Keeping, HFEngine, current=dict, left=dict):
    """An adapter that is removed leaves its files under its name, for the next of that name."""

    @hookimpl
    def genlm_add_lora(self, adapter):
        path = self.left.get(adapter.name, adapter.path)
        added = add_lora(super(), evolve(adapter, path=path))
        self.current[adapter.name] = adapter
        return added

    @hookimpl
    def genlm_remove_lora(self, adapter):
        if self.current.get(adapter.name) == adapter:
            self.left[adapter.name] = adapter.path
            del self.current[adapter.name]
        return super().genlm_remove_lora(adapter)


# --- written after the clauses on schedules, before any was run on them -----------------------


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
