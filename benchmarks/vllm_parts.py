"""What three parts of genlm-vllm give, in CPU time

Each part writes into vLLM's scheduler, or counts what vLLM's cache holds. Each is measured on the
work that it is for, by turns with itself switched off, in one process, on equal contexts.

``forks.py``: half of n contexts, each continued twice, step by step. Without it a fork computes
again what it shares of a block that is not full. ``new_requests.py``: n new contexts that share all
but their last 8 tokens, and not a whole number of blocks. Without it each computes what it shares
of the block in which they part. ``cache_usage.py``: n contexts behind one prompt of 400 tokens grow
by a token a step, in a cache of 4,096 tokens. Without it what contexts share is counted for each of
them, and live sessions are dropped earlier.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

from benchmarks.protocol import Bench, main
from benchmarks.vllm_sessions import ENGINE, Contexts, Way, gathered, ratios

PLUGIN = "vllm"

CONTEXTS = (8, 32)
STEPS = 8
VOCABULARY = range(100, 40_000)

#: A cache of 4,096 tokens for SmolLM2-135M in float32.
SMALL = ENGINE | {"kv_cache_memory_bytes": 128 * 32 * 46_080 + (1 << 20)}

#: A function that gives the contexts of each step, from their number and a source of random ids.
Program = Callable[[int, random.Random], Iterator[Contexts]]


def ids(source: random.Random, n: int) -> list[int]:
    return source.choices(VOCABULARY, k=n)


def forking(n: int, source: random.Random) -> Iterator[Contexts]:
    contexts = [ids(source, 68) for _ in range(n)]
    yield contexts
    for _ in range(STEPS):
        contexts = [[*one, *ids(source, 1)] for one in contexts[: n // 2] for _ in range(2)]
        yield contexts


def beginning_alike(n: int, source: random.Random) -> Iterator[Contexts]:
    for _ in range(STEPS):
        prompt = ids(source, 60)
        yield [[*prompt, *ids(source, 8)] for _ in range(n)]


def behind_a_prompt(n: int, source: random.Random) -> Iterator[Contexts]:
    prompt = ids(source, 400)
    contexts = [[*prompt, *ids(source, 8)] for _ in range(n)]
    yield contexts
    for _ in range(STEPS):
        contexts = [[*one, *ids(source, 1)] for one in contexts]
        yield contexts


def parts() -> dict[str, tuple[Program, Callable[[], AbstractContextManager[Any]]]]:
    """For each part's name, its workload, and how to switch it off."""
    from genlm.vllm.cache_usage import CacheUsage
    from genlm.vllm.forks import Forks
    from genlm.vllm.new_requests import NewRequests

    return {
        "forks.py": (
            forking,
            lambda: patch.object(Forks, "_best_source", lambda self, request, known: (None, known)),
        ),
        "new_requests.py": (
            beginning_alike,
            lambda: patch.object(NewRequests, "held_back", lambda self: nullcontext()),
        ),
        "cache_usage.py": (
            behind_a_prompt,
            lambda: patch.object(CacheUsage, "_blocks", lambda self, *given: iter(())),
        ),
    }


def ours(bench: Bench) -> None:
    from genlm.vllm import AsyncVirtualLM

    with (
        AsyncVirtualLM.from_name(bench.model, SMALL, cache_size=0) as lm,
        asyncio.Runner() as runner,
    ):
        ask = gathered(lm, runner)
        for name, (program, switched_off) in parts().items():
            for n in CONTEXTS[:1] if bench.quick else CONTEXTS:
                times: dict[str, list[float]] = {"as it is": [], "switched off": []}
                for seed in range(1 if bench.quick else 3):
                    for way, switch in (("as it is", nullcontext), ("switched off", switched_off)):
                        lm.clear_kv_cache()
                        with switch():
                            times[way] += measured(ask, program(n, random.Random(seed)))
                for way, values in times.items():
                    bench.record(f"{name}, {way}", values, unit="ms", x=n)
                gives = ratios(times["switched off"], times["as it is"])
                bench.record(f"{name}: times as much without", gives, unit="times", x=n)


def measured(ask: Way, steps: Iterator[Contexts]) -> list[float]:
    """Milliseconds of CPU time of each step."""
    times = []
    for contexts in steps:
        began = time.process_time()
        ask(contexts)
        times.append(1e3 * (time.process_time() - began))
    return times


if __name__ == "__main__":
    main(ours=ours)
