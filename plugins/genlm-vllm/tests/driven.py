"""An engine that a test drives through its one step, as the core does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.types import Adapter, Query, Request, SampleRequest, SamplingParams, ScoreRequest

# Small enough that prompts are computed in chunks, sessions give way to each other (the cache of
# the small model holds 864 tokens), and the length limit is near.
SMALL = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 28 * 32 * 1024,
}

VOCABULARY = 2048


def text(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(100, VOCABULARY), k=length))


class Driven:
    """An engine, and ways to drive it through its one step, as the core does."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self, *newcomers: Request, dropped: Sequence[Request] = ()) -> dict[Request, Any]:
        """One step: what was answered."""
        kinds: dict[type, list[Any]] = {Query: [], SampleRequest: [], ScoreRequest: []}
        for request in newcomers:
            kinds[type(request)].append(request)
        answers = self._engine.genlm_step(*kinds.values(), list(dropped))
        return {answer.request: answer.result for answer in answers}

    def ask(self, *requests: Request) -> list[Any]:
        """What the engine says of each request, admitted together."""
        answers = self.step(*requests)
        while len(answers) < len(set(requests)):
            answers |= self.step()
        return [answers[request] for request in requests]

    @contextmanager
    def computed_tokens(self) -> Iterator[list[int]]:
        """How many tokens each forward pass computes, seen from the model itself."""
        counts: list[int] = []
        hook = self.model.register_forward_pre_hook(
            lambda module, args, kwargs: counts.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        yield counts
        hook.remove()

    def assert_cold_rows(self, rows: Mapping[Query, Any], atol: float = 5e-4) -> None:
        """Rows against those that read no key/value state of others."""
        for query, row in rows.items():
            (cold,) = self.ask(Query(query.token_ids, query.adapter, cold=True))
            torch.testing.assert_close(row, cold, atol=atol, rtol=0)

    def computes(self, *asked: Query | tuple[int, ...]) -> list[int]:
        """How many tokens each forward pass computes for rows, which are the cold ones."""
        queries = [each if isinstance(each, Query) else Query(each) for each in asked]
        with self.computed_tokens() as counts:
            rows = self.ask(*queries)
        self.assert_cold_rows(dict(zip(queries, rows, strict=True)))
        return counts

    def draw(self, queries: Sequence[Query], params: Sequence[SamplingParams]) -> list[Any]:
        return self.ask(*map(SampleRequest, queries, params))

    def score(self, queries: Sequence[Query], continuations: Sequence[Any]) -> list[Any]:
        return self.ask(*map(ScoreRequest, queries, continuations))


def check_random_program(
    engine: Driven, seed: int, adapters: Sequence[Adapter | None] = (None,), steps: int = 25
) -> None:
    """Of a dozen contexts some are extended in each step, by a token or by many, once or by forks,
    beside draws; some leave and others come. Rows are the cold ones, draws those made alone."""
    dice = random.Random(seed)
    answers: dict[Request, Any] = {}
    rows: dict[Query, Any] = {}
    draws: list[SampleRequest] = []
    known = [Query(text(n, dice.choice([1, 20, 40, 90])), dice.choice(adapters)) for n in range(12)]
    for step in range(steps):
        batch = dict.fromkeys(
            each.extended(text(dice.randrange(1 << 30), dice.choice([1, 1, 1, 2, 40])))
            for each in dice.sample(known, dice.randrange(1, 9))
            for _ in range(dice.choice([1, 1, 3]))
            if len(each.token_ids) < 200
        )
        newcomers: list[Request] = [*batch]
        if step % 4 == 1:
            # A long one, and some with a seed, whose prompts must be computed in one step.
            long = SamplingParams(max_tokens=190, temperature=0.0)
            params = long if step == 5 else SamplingParams(max_tokens=8, seed=step)
            prompt = Query(text(step, 5 if params is long else 50), dice.choice(adapters))
            draws.append(SampleRequest(prompt, params))
            newcomers.append(draws[-1])
        found = engine.step(*newcomers)
        while not found.keys() >= batch.keys():
            found |= engine.step()
        answers |= found
        rows |= {query: found[query] for query in [*batch][:4]}
        known = [*dice.sample(known, 6), *[*batch][:6]]
        known.append(Query(text(100 + step, 30), dice.choice(adapters)))
    while not answers.keys() >= set(draws):
        answers |= engine.step()
    engine.genlm_clear_kv_cache()
    engine.assert_cold_rows(rows)
    for draw in draws:
        assert answers[draw] == engine.draw([draw.query], [draw.params])[0]
