"""Faults in draws and scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import evolve

from genlm.core import Query, SamplingParams, hookimpl
from genlm.core.mock import MockEngine

from .registry import breaks


class SamplingMutant(MockEngine):
    """An engine that draws with other parameters than it was given."""

    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        raise NotImplementedError

    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        return super().genlm_sample(
            queries, [self.faulty(p, i, len(params)) for i, p in enumerate(params)]
        )


@breaks("seed_fixes_the_draw")
class SeedDependsOnTheBatch(SamplingMutant):
    """One generator for the whole batch: the size of the batch goes into every draw."""

    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return params if params.seed is None else evolve(params, seed=params.seed + together - 1)


@breaks("draws_are_separate")
class DrawsWithoutEntropy(SamplingMutant):
    """Without a seed, the seed is 0."""

    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return evolve(params, seed=params.seed or 0)


@breaks("temperature_zero_is_argmax")
class ColdIsOnlyCool(SamplingMutant):
    """Temperature 0 is a low one: the second most likely token has its chances."""

    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return params if params.temperature else evolve(params, temperature=0.5, seed=0)


@breaks("top_k_and_top_p")
class TopKIgnored(SamplingMutant):
    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return evolve(params, top_k=None)


@breaks("stop_token_ends_the_draw")
class StopTokenLeftIn(MockEngine):
    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        free = super().genlm_sample(
            queries, [evolve(p, stop_token_ids=frozenset()) for p in params]
        )
        ends = [
            next(
                (i + 1 for i, token_id in enumerate(ids) if token_id in p.stop_token_ids), len(ids)
            )
            for ids, p in zip(free, params, strict=True)
        ]
        return [ids[:end] for ids, end in zip(free, ends, strict=True)]


@breaks("max_tokens")
class OneTokenTooMany(SamplingMutant):
    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return evolve(params, max_tokens=params.max_tokens + 1)


@breaks("frequencies_agree_with_rows")
class TemperatureIgnored(SamplingMutant):
    def faulty(self, params: SamplingParams, place: int, together: int) -> SamplingParams:
        return evolve(params, temperature=min(params.temperature, 1.0))


@breaks("adapter_in_sampling")
class DrawsFromTheBaseModel(MockEngine):
    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]]:
        return super().genlm_sample([evolve(query, adapter=None) for query in queries], params)


@breaks("scores_agree_with_rows")
class ScoresOffByOne(MockEngine):
    """Each token is scored by the row of the token before it."""

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> Any:
        shorter = [
            evolve(query, token_ids=query.token_ids[:-1] or query.token_ids) for query in queries
        ]
        return super().genlm_sequence_logprobs(shorter, continuations)
