"""Programs that compute where the rows are, over replicas: tokens a second, and CPU time

The engines are mocks with 258 tokens. ``rows``, ``then`` and ``population`` are three forms of one
program: each token is drawn among half of the vocabulary. ``tokens a second of n replicas``: waves
of 64 contexts a replica, whose engines take 20 ms for a batch; the floor is 64 / 20 ms for each
replica. ``CPU time of the program``: of all threads of its own process, for a token, with 512
contexts a wave and two replicas that take no time. Replicas share the processor's cores with the
program.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.ray import fleet, new_contexts

PLUGIN = "ray"

REPLICAS = (1, 2, 4, 8)
DELAY, WAVE, LARGE_WAVE = 0.02, 64, 512

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
    with fleet("mock", "mock", 2, cache_size=0) as lm:
        bench.clock = time.process_time
        for name, ask in forms().items():
            bench.time(
                f"CPU time of the program, {name}",
                lambda wave, ask=ask: asyncio.run(ask(lm, wave)),
                unit="us", x=LARGE_WAVE, per=LARGE_WAVE, warm=2, repeat=waves,
                prepare=lambda: new_contexts(LARGE_WAVE),
            )  # fmt: skip


def floor(bench: Bench) -> None:
    for replicas in REPLICAS:
        for name in forms():
            case = f"tokens a second of n replicas, {name}"
            bench.record(case, [replicas * WAVE / DELAY], unit="tokens/s", x=replicas)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
