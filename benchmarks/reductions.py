"""Programs that compute where the rows are, over replicas: tokens a second, and CPU time

The engines are mocks with 258 tokens. ``rows``, ``then`` and ``population`` are three forms of one
program: each token is drawn among half of the vocabulary. ``tokens a second of n replicas``: waves
of 64 contexts a replica, whose engines take 20 ms for a batch; the floor is 64 / 20 ms for each
replica. ``tokens a second of examples/smc.py``: the example itself, 12 tokens of 64 particles a
replica, none of which end. ``CPU time of the program``: of all threads of its own process, for a
token, with 512 and 4,096 contexts a wave and two replicas that take no time; a process that has a
core of its own takes as many tokens a second as that time goes into a second. Replicas share the
processor's cores with the program.
"""

from __future__ import annotations

import asyncio
import importlib
import itertools
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.ray import fleet, new_contexts

PLUGIN = "ray"

REPLICAS = (1, 2, 4, 8)
DELAY, WAVE, LARGE_WAVES = 0.02, 64, (512, 4096)

#: Of the example.
TOKENS, EXAMPLE = 12, "tokens a second of examples/smc.py"

seeds = itertools.count()

#: Asks for a token of each context.
Form = Callable[[Any, list[list[int]]], Any]


def forms() -> dict[str, Form]:
    import torch

    from genlm.core.reductions import draw_among

    among = draw_among(torch.arange(0, 258, 2))

    async def by_row(lm: Any, ids: list[int]) -> Any:
        return among(0.5)([await lm.next_token_logprobs(ids)])

    async def rows(lm: Any, contexts: list[list[int]]) -> None:
        await asyncio.gather(*(by_row(lm, ids) for ids in contexts))

    async def then(lm: Any, contexts: list[list[int]]) -> None:
        await asyncio.gather(*(lm.next_token_logprobs(ids, then=among(0.5)) for ids in contexts))

    async def population(lm: Any, contexts: list[list[int]]) -> None:
        await lm.batch_next_token_logprobs(contexts, then=among(0.5))

    return {"rows": rows, "then": then, "population": population}


def example(lm: Any, particles: int) -> float:
    """Tokens a second of the example."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    smc = importlib.import_module("smc").smc
    source, allowed = random.Random(next(seeds)), torch.arange(0, 256, 2)  # without the end
    prompt = [source.randrange(256) for _ in range(20)]  # which is not in any cache
    began = time.perf_counter()
    asyncio.run(smc(lm, prompt, allowed, particles, TOKENS, source))
    return particles * TOKENS / (time.perf_counter() - began)


def ours(bench: Bench) -> None:
    waves = 3 if bench.quick else 20
    for replicas in REPLICAS[:2] if bench.quick else REPLICAS:
        with fleet("mock", "mock", replicas, cache_size=0, delay=DELAY) as lm:
            for name, ask in forms().items():
                asyncio.run(ask(lm, new_contexts(WAVE * replicas)))
                contexts = [new_contexts(WAVE * replicas) for _ in range(waves)]

                async def run(contexts: Any = contexts, ask: Form = ask, lm: Any = lm) -> None:
                    for wave in contexts:
                        await ask(lm, wave)

                began = time.perf_counter()
                asyncio.run(run())
                rate = waves * WAVE * replicas / (time.perf_counter() - began)
                case = f"tokens a second of n replicas, {name}"
                bench.record(case, [rate], unit="tokens/s", x=replicas)
            rates = [example(lm, WAVE * replicas) for _ in range(2 if bench.quick else 6)]
            bench.record(EXAMPLE, rates[1:], unit="tokens/s", x=replicas)
    with fleet("mock", "mock", 2, cache_size=0) as lm:
        bench.clock = time.process_time
        for (name, ask), n in itertools.product(forms().items(), LARGE_WAVES):
            bench.time(
                f"CPU time of the program, {name}",
                lambda wave, ask=ask: asyncio.run(ask(lm, wave)),
                unit="us", x=n, per=n, warm=2, repeat=waves,
                prepare=lambda n=n: new_contexts(n),
            )  # fmt: skip


def floor(bench: Bench) -> None:
    for replicas in REPLICAS:
        cases = [f"tokens a second of n replicas, {name}" for name in forms()]
        for case in (*cases, EXAMPLE):
            bench.record(case, [replicas * WAVE / DELAY], unit="tokens/s", x=replicas)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
