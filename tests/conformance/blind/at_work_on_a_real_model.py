"""Mutants of a tiny real model behind ``genlm-hf``: what breaks where requests meet. Written before
the clauses on schedules.

Each cites a thread that reports the bug, or one of its kind. Most take hold of the engine's hooks
and of the torch module; those of growing tables need its pool and its store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve

from genlm.core import Adapter, Answer, Query, hookimpl
from genlm.core.engines.kv.commands import Command, Copy
from genlm.core.engines.prefixes import key_of
from genlm.core.engines.segments import Row, Trunk
from genlm.hf.engine import HFEngine
from genlm.hf.options import HFOptions
from tests.engines import add_lora

from .common import Forgetting, Keeping, cited
from .of_a_real_model import Hooked, rotary_of


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
        return [(query, query) for query in queries]

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


# --- requests that are cancelled --------------------------------------------------------------


class ProgressOfADroppedPrompt(Steps):
    """A newcomer begins with what was computed of a prompt that is dropped in that step.

    https://github.com/sgl-project/sglang-jax/pull/1008
    """

    left: tuple[int, ...] | None = None

    def let_go(self, dropped: list[Query]) -> list[Query]:
        for query in dropped:
            if self.begun(query):
                self.left = query.token_ids[:16]
        return super().let_go(dropped)

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        given = super().given(queries, dropped)
        if self.left is not None and queries:
            query, left, self.left = queries[0], self.left, None
            if query.length > len(left):
                given[0] = query, evolve(query, token_ids=(*left, *query.token_ids[len(left) :]))
        return given


class RowOfADroppedOne(Steps):
    """A row that is dropped is computed all the same, and given to a newcomer.

    https://github.com/sgl-project/sglang/pull/36988
    """

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        given = super().given(queries, dropped)
        if dropped and queries:
            given[0] = queries[0], dropped[0]
        return given


class PlaceLeaksWithADroppedRow(Keeping, Steps, waiting=list):
    """Of 64 places each dropped request keeps one for ever.

    https://github.com/raullenchai/Rapid-MLX/issues/1759
    """

    places = 64

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        self.places -= sum(query not in self.waiting for query in dropped)
        self.waiting = [query for query in self.waiting if query not in dropped] + queries
        free = max(self.places - len(self.asked), 0)
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        return [(query, query) for query in admitted]

    def lost(self) -> None:
        self.waiting.clear()


class DroppedTakesAnotherWithIt(Steps):
    """The request behind one that is dropped leaves with it, by its old place in the list.

    https://github.com/waybarrios/vllm-mlx/pull/769
    """

    def let_go(self, dropped: list[Query]) -> list[Query]:
        known = list(self.asked)
        gone = super().let_go(dropped)
        for query in gone:
            at = known.index(query) + 1
            if at < len(known) and known[at] in self.asked and known[at].adapter:
                del self.asked[known[at]]
                gone.append(known[at])
        return list(dict.fromkeys(gone))


class HalfComputedPromptIsBlank(Steps):
    """What was computed of a dropped prompt is made blank, and found by the next that begins so.

    https://github.com/sgl-project/sglang/pull/36926
    """

    def let_go(self, dropped: list[Query]) -> list[Query]:
        tree = self._strategy.planner.tree
        for query in dropped:
            if self.begun(query):
                version = 0 if query.adapter is None else query.adapter.version
                found, _ = tree.nearest(key_of(version, query.token_ids))
                if isinstance(found, Row):
                    self._runner.pool.blank(found.slot, 0)
                elif found is not None:
                    for keys, values in found.layers:
                        keys.zero_(), values.zero_()
        return super().let_go(dropped)


# --- whose turn it is -------------------------------------------------------------------------


class EightShortestRun(Keeping, Steps, waiting=list):
    """In every step the eight shortest run.

    https://github.com/sgl-project/sglang/issues/32549
    """

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        self.waiting = [query for query in self.waiting if query not in dropped] + queries
        self.waiting.sort(key=lambda query: query.length)
        free = max(8 - len(self.asked), 0)
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        return [(query, query) for query in admitted]

    def lost(self) -> None:
        self.waiting.clear()


class DeferredBehindNewcomers(Keeping, Steps, waiting=list):
    """Of eight places, one that is free goes to a newcomer before those who wait.

    https://github.com/ggml-org/llama.cpp/issues/15008
    """

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        self.waiting = queries + [query for query in self.waiting if query not in dropped]
        free = max(8 - len(self.asked), 0)
        admitted, self.waiting = self.waiting[:free], self.waiting[free:]
        return [(query, query) for query in admitted]

    def lost(self) -> None:
        self.waiting.clear()


# --- requests in flight together --------------------------------------------------------------


class NewcomersBesideAChunkSwapped(Steps):
    """Of newcomers that come while a long prompt is under way, the first two change places.

    https://github.com/ggml-org/llama.cpp/pull/14853
    """

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        given = super().given(queries, dropped)
        if self.asked and len(queries) > 1:
            given[:2] = [(queries[0], queries[1]), (queries[1], queries[0])]
        return given


class AdapterOfTheFirstBeyondEight(Steps):
    """From the ninth newcomer of a step on, who has an adapter gets the first one's.

    https://github.com/vllm-project/vllm-metal/pull/351
    """

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        first = next((query.adapter for query in queries if query.adapter), None)
        return [
            (query, evolve(query, adapter=first) if at >= 8 and query.adapter else query)
            for at, query in enumerate(queries)
        ]


class PositionsOneOffInCompany(Hooked):
    """Tokens from position 256 on get positions one too high, where others run beside them.

    https://github.com/tenstorrent/vllm/issues/415
    """

    def hook(self, model: Any) -> None:
        def shift(module: Any, arguments: Any, keywords: Any) -> Any:
            position_ids = keywords.get("position_ids", arguments[-1])
            if position_ids.shape[0] > 1:
                resumed = position_ids.flatten()[0] > 0
                if bool(resumed) or bool((position_ids.flatten().diff() > 1).any()):
                    position_ids = position_ids + (position_ids >= 256)
            return (arguments[0],), {"position_ids": position_ids}

        rotary_of(model).register_forward_pre_hook(shift, with_kwargs=True)


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


class TablesGrowByTheirFirstColumns(Pooled):
    """When the tables grow, 256 columns of each row are copied.

    https://github.com/karpathy/nanochat/issues/187
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        resize = pool.resize

        def first_columns(rows: int, columns: int, kept: Sequence[int] = ()) -> None:
            resize(rows, columns, kept)
            with torch.inference_mode():
                for layer in pool.layers if kept else ():
                    layer.keys[: len(kept), :, 256:] = 0
                    layer.values[: len(kept), :, 256:] = 0

        pool.resize = first_columns


class RowsBeyond64AreNotMoved(Pooled):
    """When the tables grow, 64 rows are copied.

    https://github.com/ml-explore/mlx-lm/pull/1141
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        resize = pool.resize

        def first_rows(rows: int, columns: int, kept: Sequence[int] = ()) -> None:
            resize(rows, columns, kept)
            with torch.inference_mode():
                for layer in pool.layers if kept else ():
                    layer.keys[64:] = 0
                    layer.values[64:] = 0

        pool.resize = first_rows


class PinnedAreNotMoved(Pooled):
    """When the tables grow, the rows move up; what is pinned stays where it was.

    https://github.com/ggml-org/llama.cpp/issues/12253
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        resize = pool.resize

        def without_the_pinned(rows: int, columns: int, kept: Sequence[int] = ()) -> None:
            resize(rows, columns, kept)
            with torch.inference_mode():
                for one in planner.tree.index.values() if kept else ():
                    for keys, values in one.layers if one.pinned and hasattr(one, "layers") else ():
                        keys.copy_(keys.roll(1, 2)), values.copy_(values.roll(1, 2))

        pool.resize = without_the_pinned


class ForksCopy128Columns(Pooled):
    """A fork copies 128 columns of its parent's row.

    https://github.com/ml-explore/mlx-lm/pull/1000
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        fork = pool.fork
        pool.fork = lambda sources, targets, columns: fork(sources, targets, min(columns, 128))


class TrunkWithoutItsLastColumn(Pooled):
    """Where several rows stand on a long beginning, its last position is not copied.

    https://github.com/strands-rl/strands-sglang/issues/34
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        table = planner._table
        do = table.do

        def all_but_one(command: Command) -> None:
            do(command)
            if isinstance(command, Copy) and isinstance(command.target, Trunk):
                with torch.inference_mode():
                    for keys, values in command.target.layers if command.size >= 200 else ():
                        keys[0, :, command.size - 1] = 0
                        values[0, :, command.size - 1] = 0

        table.do = all_but_one


class RestOfARowOneOff(Pooled):
    """Where a long beginning is taken out of a row, the rest moves one column too far.

    https://github.com/waybarrios/vllm-mlx/pull/353
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        shift = pool.shift

        def too_far(slot: int, columns: slice) -> None:
            begin = columns.start + (columns.start >= 128)
            shift(slot, slice(begin, columns.stop))

        pool.shift = too_far


class PinsOfRemovedAdaptersStay(Pooled):
    """Removing an adapter leaves its pinned contexts in memory.

    https://github.com/vllm-project/vllm/issues/54839
    """

    budget = 2 << 20  # 8,192 positions

    def spoil(self, pool: Any, planner: Any) -> None:
        tree, drop_adapter, drop = planner.tree, planner.drop_adapter, planner.tree.drop

        def all_but_pinned(version: int) -> None:
            tree.drop = lambda one: one.pinned or drop(one)
            try:
                drop_adapter(version)
            finally:
                tree.drop = drop

        planner.drop_adapter = all_but_pinned


class RowsOfARemovedAdapterAreFreeTwice(Pooled):
    """The rows of a removed adapter are given out twice.

    https://github.com/openvinotoolkit/model_server/issues/4428
    """

    def spoil(self, pool: Any, planner: Any) -> None:
        tree, drop = planner.tree, planner.drop_adapter

        def twice(version: int) -> None:
            before = set(tree._free)
            drop(version)
            freed = [slot for slot in tree._free if slot not in before]
            tree._free = sorted([*tree._free, *freed[:1]])

        planner.drop_adapter = twice


# --- long continuations, long contexts --------------------------------------------------------


class ScoresFromAHundredOn(HFEngine):
    """From position 100 of a continuation on, the score is that of the token before.

    https://github.com/vllm-project/vllm/pull/29216
    """

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        scores = super().genlm_sequence_logprobs(queries, continuations)
        return [
            torch.cat([score[:100], score[99:-1]]) if len(score) > 100 else score
            for score in scores
        ]


class ScoredContinuationsOneTokenShort(Forgetting, Steps, scored=set):
    """A context that goes on where a continuation was scored starts without that one's last token.

    https://github.com/ml-explore/mlx-lm/pull/602
    """

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Sequence[torch.Tensor]:
        pairs = zip(queries, continuations, strict=True)
        self.scored |= {(*query.token_ids, *continuation) for query, continuation in pairs}
        return super().genlm_sequence_logprobs(queries, continuations)

    def given(self, queries: list[Query], dropped: list[Query]) -> list[tuple[Query, Query]]:
        return [(query, self.short(query)) for query in queries]

    def short(self, query: Query) -> Query:
        ids = query.token_ids
        if len(ids) > 2 and ids[:-1] in self.scored:
            return evolve(query, token_ids=(*ids[:-2], ids[-1]))
        return query


class PositionsEndAt512(Hooked):
    """Positions are clamped to 511, in cold rows too.

    https://github.com/kvcache-ai/ktransformers/issues/73
    """

    def hook(self, model: Any) -> None:
        def clamp(module: Any, arguments: Any, keywords: Any) -> Any:
            position_ids = keywords.get("position_ids", arguments[-1])
            return (arguments[0],), {"position_ids": position_ids.clamp(max=511)}

        rotary_of(model).register_forward_pre_hook(clamp, with_kwargs=True)


class PositionsInBfloat16(Hooked):
    """Positions are rounded to bfloat16: beyond 256 neighbours have the same, in cold rows too.

    https://github.com/huggingface/transformers/pull/29285
    """

    def hook(self, model: Any) -> None:
        def rounded(module: Any, arguments: Any, keywords: Any) -> Any:
            position_ids = keywords.get("position_ids", arguments[-1])
            return (arguments[0],), {"position_ids": position_ids.bfloat16().long()}

        rotary_of(model).register_forward_pre_hook(rounded, with_kwargs=True)


# --- adapters ---------------------------------------------------------------------------------


class AdaptersOfAllModelsByNumber(HFEngine):
    """The adapters of all models of the process are in one table, by number.

    https://github.com/ml-explore/mlx-lm/issues/1776
    """

    paths: ClassVar[dict[int, str]] = {}

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        path = self.paths.setdefault(adapter.version, adapter.path)
        try:
            return add_lora(super(), evolve(adapter, path=path))
        except Exception:
            del self.paths[adapter.version]
            raise

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self.paths.pop(adapter.version, None)
        path = adapter.path
        return super().genlm_remove_lora(evolve(adapter, path=path))


class NameOfARemovedAdapter(Keeping, HFEngine, current=dict, left=dict):
    """An adapter that is removed leaves its files under its name, for the next of that name.

    https://github.com/vllm-project/vllm/issues/42633
    """

    @hookimpl
    def genlm_add_lora(self, adapter: Adapter) -> bool:
        path = self.left.get(adapter.name, adapter.path)
        added = add_lora(super(), evolve(adapter, path=path))
        self.current[adapter.name] = adapter
        return added

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        if self.current.get(adapter.name) == adapter:
            self.left[adapter.name] = adapter.path
            del self.current[adapter.name]
        return super().genlm_remove_lora(adapter)


MUTANTS = cited(globals())
