"""Faults in draws and scores."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve

from genlm.core import SamplingParams, hookimpl
from genlm.core.mock import MockEngine
from genlm.core.sampling import TokenDrawer

from .registry import breaks


def drawing(name: str, change: Callable[[SamplingParams, int], SamplingParams]) -> type:
    """An engine that draws with what ``change`` makes of the parameters it is given, and of how
    many draws are made together."""

    class Drawing(MockEngine):
        @hookimpl
        def genlm_sample(self, queries, params):
            return super().genlm_sample(queries, [change(p, len(params)) for p in params])

    Drawing.__name__ = name
    return Drawing


for name, clause, change in (
    # One generator for the whole batch: the size of the batch goes into every draw.
    (
        "SeedDependsOnTheBatch",
        "seed_fixes_the_draw",
        lambda p, n: p if p.seed is None else evolve(p, seed=p.seed + n - 1),
    ),
    ("DrawsWithoutEntropy", "draws_are_separate", lambda p, n: evolve(p, seed=p.seed or 0)),
    # Temperature 0 is a low one: the second most likely token has its chances.
    (
        "ColdIsOnlyCool",
        "temperature_zero_is_argmax",
        lambda p, n: p if p.temperature else evolve(p, temperature=0.5, seed=0),
    ),
    ("TopKIgnored", "top_k_and_top_p", lambda p, n: evolve(p, top_k=None)),
    # A top_p that is 0 in half precision is taken for none.
    (
        "TinyNucleusIsNone",
        "top_k_and_top_p",
        lambda p, n: evolve(p, top_p=None) if (p.top_p or 1.0) < 1e-5 else p,
    ),
    ("OneTokenTooMany", "max_tokens", lambda p, n: evolve(p, max_tokens=p.max_tokens + 1)),
    (
        "TemperatureIgnored",
        "frequencies_agree_with_rows",
        lambda p, n: evolve(p, temperature=min(p.temperature, 1.0)),
    ),
    # The fast path for draws without top_k and top_p takes no temperature above 1.
    (
        "PlainTemperatureClipped",
        "frequencies_agree_with_rows",
        lambda p, n: p if p.top_k or p.top_p else evolve(p, temperature=min(p.temperature, 1.0)),
    ),
):
    breaks(clause)(drawing(name, change))


@breaks("long_continuations")
class StopTokenLeftIn(MockEngine):
    @hookimpl
    def genlm_sample(self, queries, params):
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


@breaks("adapter_in_sampling")
class DrawsFromTheBaseModel(MockEngine):
    @hookimpl
    def genlm_sample(self, queries, params):
        return super().genlm_sample([evolve(query, adapter=None) for query in queries], params)


@breaks("scores_at_every_length")
class ScoresOffByOne(MockEngine):
    """Each token is scored by the row of the token before it."""

    @hookimpl
    def genlm_sequence_logprobs(self, queries, continuations):
        shorter = [
            evolve(query, token_ids=query.token_ids[:-1] or query.token_ids) for query in queries
        ]
        return super().genlm_sequence_logprobs(shorter, continuations)


@breaks("unseeded_after_seeded")
class SeedStaysSet(MockEngine):
    """A seed sets the one generator of the process: draws without a seed follow from it."""

    last: int | None = None

    def _draw(self, query, params):
        if params.seed is None and self.last is not None:
            params = evolve(params, seed=self.last + 1)
        self.last = params.seed
        return super()._draw(query, params)


@breaks("first_and_last_token_stop")
class TokenZeroNeverStops(MockEngine):
    """The token is tested as a truth before it is looked for among the stop tokens."""

    def _draw(self, query, params):
        drawer, drawn = TokenDrawer(params), []
        while len(drawn) < params.max_tokens:
            token = drawer.draw(self.row(query.extended(tuple(drawn))))
            if token and token in params.stop_token_ids:
                break
            drawn.append(token)
        return drawn


@breaks("long_draws_do_not_repeat")
class NumbersRepeatAfter32(MockEngine):
    """A draw has 32 random numbers, and begins with the first one again."""

    def _draw(self, query, params):
        if params.seed is None:
            params = evolve(params, seed=int(torch.randint(1 << 30, ())))
        drawn: list[int] = []
        while len(drawn) < params.max_tokens:
            most = min(32, params.max_tokens - len(drawn))
            piece = super()._draw(query.extended(tuple(drawn)), evolve(params, max_tokens=most))
            drawn += piece
            if len(piece) < most:
                break
        return drawn
