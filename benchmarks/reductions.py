"""Programs that compute where the rows are, over replicas: tokens a second, and CPU time

The engines are mocks with 258 tokens. ``rows``, ``then``, ``batch`` and ``population`` are four
forms of one program: each token is drawn among half of the vocabulary, by a coroutine that asks for
the row or gives the function, by one call for all contexts, or by a population, which also grows by
the tokens. ``tokens a second of n replicas``: waves of 64 contexts a replica, whose engines take
20 ms for a batch; the floor is 64 / 20 ms for each replica. All processes share the cores of this
machine. ``with a core each``: derived from the CPU times of these waves: a wave would take the 20
ms, then the CPU time of the program for all of its tokens, then that of one replica for its share.
``batch for 80 %``: how long a batch must take for that wave to reach
80 % of the floor. ``tokens a second of examples/smc.py``: the example itself, 12 tokens of 64
particles a replica, none of which end. ``CPU time of the program``: of all threads of its own
process, for a token, with 512 and 4,096 contexts a wave and two replicas that take no time; a
process that has a core of its own takes as many tokens a second as that time goes into a second.
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

from attrs import frozen

from benchmarks.protocol import Bench, main
from benchmarks.ray import fleet, new_contexts

PLUGIN = "ray"

REPLICAS = (1, 2, 4, 8)
DELAY, WAVE, LARGE_WAVES = 0.02, 64, (512, 4096)

#: The tokens of the example, and the name of its figure.
TOKENS, EXAMPLE = 12, "tokens a second of examples/smc.py"

seeds = itertools.count()


@frozen
class Form:
    """One form of the program.

    Attributes:
        prepare: Makes what a wave needs, for a model and a number of contexts.
        ask: Asks for a token of each context.
    """

    prepare: Callable[[Any, int], Any]
    ask: Callable[[Any, Any], Any]


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

    async def batch(lm: Any, contexts: list[list[int]]) -> None:
        await lm.batch_next_token_logprobs(contexts, then=among(0.5))

    async def population(lm: Any, particles: Any) -> None:
        drawn = await particles.logprobs(then=among(0.5))
        particles.extend([token for token, _ in drawn])

    def grown(lm: Any, n: int) -> Any:
        """Particles that differ."""
        source = random.Random(next(seeds))
        particles = lm.population(new_contexts(1, 17)[0], n)
        for _ in range(3):
            particles.extend([source.randrange(200) for _ in range(n)])
        return particles

    def fresh(lm: Any, n: int) -> list[list[int]]:
        return new_contexts(n)

    return {
        "rows": Form(fresh, rows),
        "then": Form(fresh, then),
        "batch": Form(fresh, batch),
        "population": Form(grown, population),
    }


def example(lm: Any, particles: int) -> float:
    """Tokens a second of the example."""
    import torch

    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    smc = importlib.import_module("smc").smc
    # Without the end of the sequence.
    source, allowed = random.Random(next(seeds)), torch.arange(0, 256, 2)
    prompt = [source.randrange(256) for _ in range(20)]  # a prompt that is in no cache
    began = time.perf_counter()
    asyncio.run(smc(lm, prompt, allowed, particles, TOKENS, source))
    return particles * TOKENS / (time.perf_counter() - began)


def replicas_seconds(lm: Any) -> float:
    """CPU seconds of all replicas' processes so far."""
    import ray

    def seconds(replica: Any) -> float:
        return time.process_time()

    asked = [handle.__ray_call__.remote(seconds) for handle in lm.underlying_model]
    return float(sum(ray.get(asked)))


def waves_of(bench: Bench, lm: Any, name: str, form: Form, replicas: int) -> None:
    """Measure waves of a form, and derive what they would take with a core for each process."""
    n, waves, rounds = WAVE * replicas, 4, 1 if bench.quick else 5

    async def run(wanted: list[Any]) -> None:
        for wave in wanted:
            await form.ask(lm, wave)

    asyncio.run(run([form.prepare(lm, n)]))
    rates, besides = [], []  # tokens a second; seconds of a wave besides the engines' own
    for _ in range(rounds):
        wanted = [form.prepare(lm, n) for _ in range(waves)]
        theirs, mine, began = replicas_seconds(lm), time.process_time(), time.perf_counter()
        asyncio.run(run(wanted))
        rates.append(n * waves / (time.perf_counter() - began))
        mine = time.process_time() - mine
        theirs = replicas_seconds(lm) - theirs
        besides.append((mine + theirs / replicas) / waves)
    case = f"tokens a second of n replicas, {name}"
    alone = [n / (DELAY + beside) for beside in besides]
    bench.record(case, rates, unit="tokens/s", x=replicas)
    bench.record(f"{case}, with a core each", alone, unit="tokens/s", x=replicas)
    batches = [4 * beside * 1e3 for beside in besides]
    bench.record(f"batch for 80 %, {name}", batches, unit="ms", x=replicas)


def ours(bench: Bench) -> None:
    for replicas in REPLICAS[:2] if bench.quick else REPLICAS:
        with fleet("mock", "mock", replicas, cache_size=0, delay=DELAY) as lm:
            for name, form in forms().items():
                waves_of(bench, lm, name, form, replicas)
            rates = [example(lm, WAVE * replicas) for _ in range(2 if bench.quick else 6)]
            bench.record(EXAMPLE, rates[1:], unit="tokens/s", x=replicas)
    with fleet("mock", "mock", 2, cache_size=0) as lm:
        bench.clock = time.process_time
        for (name, form), n in itertools.product(forms().items(), LARGE_WAVES):
            bench.time(
                f"CPU time of the program, {name}",
                lambda wave, form=form: asyncio.run(form.ask(lm, wave)),
                unit="us", x=n, per=n, warm=2, repeat=3 if bench.quick else 20,
                prepare=lambda n=n, form=form: form.prepare(lm, n),
            )  # fmt: skip


def floor(bench: Bench) -> None:
    for replicas in REPLICAS:
        cases = [f"tokens a second of n replicas, {name}" for name in forms()]
        for case in (*cases, EXAMPLE):
            bench.record(case, [replicas * WAVE / DELAY], unit="tokens/s", x=replicas)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
