"""Tokens over islands: what many workers bring, each with a model and its share of the particles.

The program is ``examples/islands.py``, over mocks that take 20 ms for a batch. No particle ends,
and weights are looked at every 16 tokens. ``tokens a second of n islands``: of all of them, where
each has 8 or 64 particles. The floor is as many tokens in 20 ms for each island. All islands share
the machine's cores, which their programs need between two batches: on two cores that is the limit
for 64 particles. ``a run with a lost worker``: 48 tokens of 64 particles on 8 islands, with a
worker killed half-way, until it has started again and has done its share.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "ray"

ISLANDS = (1, 2, 4, 8)
PARTICLES = (8, 64)
STEP_SECONDS = 0.02
TOKENS_BETWEEN_EXCHANGES = 16
TOKENS = 48

seeds = itertools.count()

CASE = "tokens a second of n islands, {} particles each"


def example() -> Any:
    """The example's module, with a cluster of its own, and particles that do not end."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
    import islands  # type: ignore[import-not-found]

    class Endless(islands.Island):  # type: ignore[misc]
        def __init__(self, *island: Any) -> None:
            super().__init__(*island)
            self.allowed = self.allowed[:-1]  # the last token is the end of the sequence

        def pid(self) -> int:
            return os.getpid()

    islands.Island = Endless
    islands.connect(None)
    return islands


def settled(islands: Any, n: int) -> list[Any]:
    """Islands whose models are loaded."""
    import ray

    island = ("mock", "mock", {"delay": STEP_SECONDS}, "Once", "e")
    workers: list[Any] = islands.settle(n, *island, num_cpus=0.01)
    ray.get([worker.requests.remote() for worker in workers])
    return workers


def seconds(islands: Any, workers: list[Any], particles: int) -> float:
    """The seconds of one run."""
    began = time.perf_counter()
    rng = random.Random(next(seeds))  # repeating an earlier run would be answered from the cache
    islands.smc(workers, particles * len(workers), TOKENS, TOKENS_BETWEEN_EXCHANGES, rng)
    return time.perf_counter() - began


def ours(bench: Bench) -> None:
    import ray

    islands = example()
    for n in ISLANDS[: 2 if bench.quick else None]:
        workers = settled(islands, n)
        for each in PARTICLES:
            spent = [seconds(islands, workers, each) for _ in range(2 if bench.quick else 6)][1:]
            rates = [TOKENS * each * n / one for one in spent]
            bench.record(CASE.format(each), rates, unit="tokens/s", x=n)
        if n == max(ISLANDS):
            victim = ray.get(workers[0].pid.remote())
            threading.Timer(TOKENS * STEP_SECONDS / 2, os.kill, (victim, signal.SIGKILL)).start()
            bench.record("a run with a lost worker", seconds(islands, workers, 8), unit="s", x=n)
        for worker in workers:
            ray.kill(worker)


def floor(bench: Bench) -> None:
    for n in ISLANDS[: 2 if bench.quick else None]:
        for each in PARTICLES:
            bench.record(CASE.format(each), each * n / STEP_SECONDS, unit="tokens/s", x=n)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
