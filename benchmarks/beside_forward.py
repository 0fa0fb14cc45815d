"""CPU time beside the forward passes: rows, and functions of rows, on the real model

256 particles of hf draw a token each among half of the vocabulary, one more token in every step.
``rows``: a coroutine asks for each row and draws from it. ``then``: a coroutine gives the same
function as ``then``, which runs for as many rows at a time as the processor caches. ``population,
then``: particles in tensors. The forms take turns step by step, each with particles of its own. CPU
time of all threads for a particle and token, without that of the model's forward passes, which are
timed on their thread: ``forward`` is theirs.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

PARTICLES, STEPS = 256, 6

#: Requests a token of each particle, and extends the particles.
Step = Callable[[list[float]], Awaitable[None]]


class Forwards:
    """CPU seconds of a model's forward passes."""

    def __init__(self, model: Any) -> None:
        self.seconds = 0.0
        forward = model.forward

        @wraps(forward)
        def timed(*given: Any, **options: Any) -> Any:
            began = time.thread_time()
            try:
                return forward(*given, **options)
            finally:
                self.seconds += time.thread_time() - began

        model.forward = timed


def forms(lm: Any, prompts: list[list[int]], n: int) -> dict[str, Step]:
    """The forms, each with particles of its own, which begin with one of the prompts."""
    import torch

    from genlm.core.reductions import draw_among

    among = draw_among(torch.arange(0, len(lm.byte_vocab), 2))
    texts = {form: [prompt] * n for form, prompt in zip(("rows", "then"), prompts, strict=False)}
    particles = lm.population(prompts[-1], n)

    async def by_row(ids: list[int], uniform: float) -> Any:
        (drawn,) = among.results_of([(among(uniform), [await lm.next_token_logprobs(ids)])])
        return drawn

    async def by_then(ids: list[int], uniform: float) -> Any:
        return await lm.next_token_logprobs(ids, then=among(uniform))

    def coroutines(form: str, one: Callable[[list[int], float], Awaitable[Any]]) -> Step:
        async def step(uniforms: list[float]) -> None:
            drawn = await asyncio.gather(*map(one, texts[form], uniforms))
            texts[form] = [
                [*ids, token] for ids, (token, _) in zip(texts[form], drawn, strict=True)
            ]

        return step

    async def population(uniforms: list[float]) -> None:
        drawn = await particles.logprobs(then=map(among, uniforms))
        particles.extend([token for token, _ in drawn])

    return {
        "rows": coroutines("rows", by_row),
        "then": coroutines("then", by_then),
        "population, then": population,
    }


def ours(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    n, steps = (16, 2) if bench.quick else (PARTICLES, STEPS)
    source = random.Random(0)
    with load_model_by_name(bench.model, "hf", cache_size=0) as lm:
        forwards = Forwards(lm.underlying_model)
        prompts = [[source.randrange(1000, 40_000) for _ in range(8)] for _ in range(3)]
        taken = forms(lm, prompts, n)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in taken}
        for at in range(2 + steps):  # in the first step, all particles are equal
            for name, step in taken.items():
                uniforms = [source.random() for _ in range(n)]
                forwards.seconds, began = 0.0, time.process_time()
                asyncio.run(step(uniforms))
                beside = time.process_time() - began - forwards.seconds
                if at > 1:
                    times[name].append((beside, forwards.seconds))
    for name, found in times.items():
        beside, forward = (
            [each / n * 1e6 for each in column] for column in zip(*found, strict=True)
        )
        bench.record(name, beside, unit="us")
        bench.record(f"{name}: forward", forward, unit="us")


if __name__ == "__main__":
    main(ours=ours)
