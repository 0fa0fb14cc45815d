"""Rows over replicas: what the way there and back costs, and what many replicas bring.

``rows at once``: n new contexts in one gather, for each. Ours are answered by two replicas of the
mock, the floor by the mock in this process, over the vocabulary of the real model. ``CPU time of
the program, rows at once``: the same without a cache, of all threads of the program's own process;
the floor gets as many rows from two bare actors, and copies each once, into memory that is there.
``extend, by affinity`` and ``extend, placed at random``: a step of 16 contexts of 200 tokens over
two replicas of hf. ``recover``: from the death of a replica, with 64 requests in flight, to the
last row, for x replicas: of two the other one answers, a single one must start again. ``64 draws``
of 75 tokens over two replicas, and the same with a death among them. ``scores at once``: x scores
of two tokens in one gather, for each. ``attach``: to load a model from a named fleet that runs
already. ``rows a second of n replicas``: waves of 64 contexts a replica, whose engines take 20 ms
for a batch; the floor is 64 / 20 ms for each replica.
The replicas only wait, so this shows where the program's own process becomes the limit.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "ray"

SIZES = (1, 8, 64, 512)
WAVES = (64, 512)  # the sizes of waves whose CPU time is measured
ROWS_PER_CALL = 128  # the most rows that a bare actor returns in one call
REPLICAS = (1, 2, 4, 8, 16)
STEP_SECONDS = 0.02
CONTEXTS_PER_REPLICA = 64

new_ids = itertools.count(1)


def new_contexts(n: int, length: int = 20) -> list[list[int]]:
    """Contexts that were not requested before."""
    source = random.Random(next(new_ids))
    return [[source.randrange(200) for _ in range(length)] for _ in range(n)]


def gather(lm: Any, contexts: Sequence[Sequence[int]]) -> None:
    async def ask() -> None:
        await asyncio.gather(*map(lm.next_token_logprobs, contexts))

    asyncio.run(ask())


def over_rows(bench: Bench, lm: Any) -> None:
    for n in SIZES:
        bench.time(
            "rows at once",
            lambda contexts: gather(lm, contexts),
            unit="us",
            x=n,
            per=n,
            prepare=lambda n=n: new_contexts(n),
        )


def cpu_time(bench: Bench, rows: Callable[[list[list[int]]], None]) -> None:
    """The CPU time of this process for ``rows`` of new contexts."""
    bench.clock = time.process_time
    for n in WAVES:
        case = "CPU time of the program, rows at once"
        bench.time(case, rows, unit="us", x=n, per=n, prepare=lambda n=n: new_contexts(n))
    bench.clock = time.perf_counter


class Bare:
    """An actor that gives rows and does nothing else."""

    def __init__(self, width: int) -> None:
        import numpy as np

        self.rows = np.random.default_rng(0).standard_normal(
            (ROWS_PER_CALL, width), dtype=np.float32
        )

    def give(self, n: int) -> Any:
        return self.rows[:n]


def over_bare_actors(bench: Bench, width: int) -> None:
    import numpy as np

    from genlm.ray.cluster import Cluster

    cluster = Cluster(None)
    ray = cluster.ray
    actors = [ray.remote(num_cpus=0.01)(Bare).remote(width) for _ in range(2)]
    own = np.ones((max(WAVES), width), dtype=np.float32)

    def rows(contexts: list[list[int]]) -> None:
        size = min(ROWS_PER_CALL, len(contexts) // len(actors))
        starts = range(0, len(contexts), size)
        calls = [actors[start // size % 2].give.remote(size) for start in starts]
        for start, call in zip(starts, calls, strict=True):
            for index, row in enumerate(ray.get(call), start):
                own[index] = row

    cpu_time(bench, rows)
    cluster.leave()


def fleet(
    model: str, backend: str, replicas: int, cache_size: int | None = None, **backend_opts: Any
) -> Any:
    from genlm.core import load_model_by_name

    options = {"backend": backend, "replicas": replicas, "backend_opts": backend_opts}
    ours = {"resources": {"num_cpus": 0.01}, "cache_size": cache_size}
    return load_model_by_name(model, "ray", {**options, **ours})


def extend(bench: Bench, case: str) -> None:
    with fleet(bench.model, "hf", 2) as lm:
        contexts = new_contexts(16, 200)

        def grown() -> list[list[int]]:
            random.Random(next(new_ids)).shuffle(contexts)
            for context in contexts:
                context.append(next(new_ids) % 200)
            return contexts

        gather(lm, contexts)
        bench.time(case, lambda asked: gather(lm, asked), repeat=8, prepare=grown)


def recover(bench: Bench, replicas: int) -> None:
    import ray

    seconds = []
    with fleet("mock", "mock", replicas, delay=STEP_SECONDS) as lm:
        for _ in range(2 if bench.quick else 5):
            one = lm.underlying_model[0]

            async def ask(contexts: list[list[int]], one: Any = one) -> None:
                rows = [asyncio.ensure_future(lm.next_token_logprobs(ids)) for ids in contexts]
                await asyncio.sleep(STEP_SECONDS / 2)
                ray.kill(one)
                await asyncio.gather(*rows)

            began = time.perf_counter()
            asyncio.run(ask(new_contexts(64)))
            seconds.append(time.perf_counter() - began)
            await_all(lm)
    bench.record("recover", seconds, unit="s", x=replicas)


def await_all(lm: Any) -> None:
    """Wait until every replica has loaded its model again."""
    import ray

    for index in range(len(lm.underlying_model)):
        while True:
            try:
                loaded = lm.underlying_model[index].__ray_call__
                ray.get(loaded.remote(lambda replica: len(replica.lm.byte_vocab)))
                break
            except ray.exceptions.RayError:
                time.sleep(0.05)


def draws_through_a_death(bench: Bench) -> None:
    import ray

    with fleet("mock", "mock", 2, continuous=True, delay=STEP_SECONDS) as lm:

        def draws(victim: Any = None) -> float:
            async def ask() -> None:
                asked = [
                    asyncio.ensure_future(lm.sample(ids, 75, [], seed=1))
                    for ids in new_contexts(64)
                ]
                await asyncio.sleep(STEP_SECONDS * 20)
                if victim is not None:
                    ray.kill(victim)
                await asyncio.gather(*asked)

            began = time.perf_counter()
            asyncio.run(ask())
            return time.perf_counter() - began

        draws()
        bench.record("64 draws", [draws() for _ in range(3)], unit="s")
        seconds = []
        for _ in range(3):
            seconds.append(draws(lm.underlying_model[0]))
            await_all(lm)
        bench.record("64 draws, one death", seconds, unit="s")


def scores_at_once(bench: Bench) -> None:
    with fleet("mock", "mock", 2, delay=STEP_SECONDS) as lm:

        def score(contexts: Sequence[Sequence[int]]) -> None:
            async def ask() -> None:
                await asyncio.gather(*(lm.sequence_logprobs(ids, [1, 2]) for ids in contexts))

            asyncio.run(ask())

        bench.time(
            "scores at once",
            score,
            unit="us",
            x=10_000,
            per=10_000,
            repeat=2,
            prepare=lambda: new_contexts(10_000),
        )


def attach(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    shared = {"backend": "mock", "name": "shared", "resources": {"num_cpus": 0.01}}
    with load_model_by_name("mock", "ray", shared):
        bench.time("attach", lambda: load_model_by_name("mock", "ray", shared).close(), unit="s")


def scale(bench: Bench) -> None:
    for replicas in REPLICAS[: 2 if bench.quick else None]:
        with fleet("mock", "mock", replicas, delay=STEP_SECONDS) as lm:
            rates = []
            gather(lm, new_contexts(CONTEXTS_PER_REPLICA * replicas))
            for _ in range(3 if bench.quick else 10):
                contexts = new_contexts(2 * CONTEXTS_PER_REPLICA * replicas)
                began = time.perf_counter()
                gather(lm, contexts)
                rates.append(len(contexts) / (time.perf_counter() - began))
        bench.record("rows a second of n replicas", rates, unit="rows/s", x=replicas)


def at_random(choose: Callable[..., Any]) -> Callable[..., Any]:
    source = random.Random(0)
    return lambda self, queries, loads: source.choices(list(loads), k=len(queries))


def ours(bench: Bench) -> None:
    from genlm.ray.affinity import Affinity

    with fleet(bench.model, "mock", 2) as lm:
        over_rows(bench, lm)
    with fleet(bench.model, "mock", 2, cache_size=0) as lm:
        cpu_time(bench, lambda contexts: gather(lm, contexts))
    extend(bench, "extend, by affinity")
    choose = Affinity.choose
    Affinity.choose = at_random(choose)  # type: ignore[method-assign]
    extend(bench, "extend, placed at random")
    Affinity.choose = choose  # type: ignore[method-assign]
    for replicas in (2, 1):
        recover(bench, replicas)
    draws_through_a_death(bench)
    scores_at_once(bench)
    attach(bench)
    scale(bench)


def floor(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    with load_model_by_name(bench.model, "mock", {"cache_size": 0}) as lm:
        over_rows(bench, lm)
        width = len(lm.byte_vocab)
    over_bare_actors(bench, width)
    for replicas in REPLICAS[: 2 if bench.quick else None]:
        rate = CONTEXTS_PER_REPLICA * replicas / STEP_SECONDS
        bench.record("rows a second of n replicas", rate, unit="rows/s", x=replicas)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
