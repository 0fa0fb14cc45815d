"""Where a step's time goes: microseconds a request

From the counters that every model keeps in `lm.stats`. What remains of the wall time is Python's
event loop, the checks, and the program itself. One engine answers at once, so that all the rest
shows; on hf all that is a small part of the engine's time. With `--quick` this is a profile in a
few seconds. The counters are always on: what they cost a request is measured too, and is given as a
share of a request's time on hf.
"""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from typing import Any

from attrs import asdict

from benchmarks.batcher import TOGETHER, fresh
from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SUFFIX = "_seconds"


def ours(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    with asyncio.Runner() as runner, load_model_by_name(bench.model, backend="hf") as lm:
        rounds = 2 if bench.quick else 5
        request = spend(bench, "hf: ", lm, runner, rounds=rounds, together=(1, 32), length=20)
    counters = count(bench)
    bench.record("counters, of a request among 32 on hf", 100 * counters / request, unit="%")
    with asyncio.Runner() as runner:
        instant(bench, runner)


def count(bench: Bench) -> float:
    """The microseconds that the counters take for a request, as its share of those for its
    batch."""
    from genlm.core.runtime.timeline import STAGES, Timeline

    timeline = Timeline()

    def batch(n: int = 32) -> None:
        for _ in range(n):
            timeline.asked(None, None)
        for stage in STAGES:
            timeline.add(stage, timeline.clock())
        timeline.batch(timeline.clock(), n)

    return bench.time("counters, a request among 32", batch, unit="us", per=32, repeat=1000)


def instant(bench: Bench, runner: asyncio.Runner) -> None:
    import torch

    from genlm.core import AsyncLM, hookimpl
    from genlm.core.mock import ByteTokenizer

    rows = torch.log_softmax(torch.randn(max(TOGETHER), 258), dim=-1)

    class Instant:
        tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

        @hookimpl
        def genlm_next_token_logprobs(self, queries: Any) -> Any:
            return rows[: len(queries)]

    with AsyncLM(Instant, backend="instant") as lm:
        rounds = 5 if bench.quick else 50
        spend(bench, "stage: ", lm, runner, rounds=rounds, together=TOGETHER, length=50)


def spend(
    bench: Bench,
    prefix: str,
    lm: Any,
    runner: asyncio.Runner,
    rounds: int,
    together: tuple[int, ...],
    length: int,
) -> float:
    """Record the stages; returns the microseconds of wall time that a request took, with the most
    together."""
    source = fresh(length)

    async def gathered(n: int) -> None:
        await asyncio.gather(*map(lm.next_token_logprobs, itertools.islice(source, n)))

    for n in together:
        runner.run(gathered(n))
        before, began = asdict(lm.stats), time.perf_counter()
        for _ in range(rounds):
            runner.run(gathered(n))
        wall, after = time.perf_counter() - began, asdict(lm.stats)
        spent = {
            name.removesuffix(SUFFIX): after[name] - before[name]
            for name in after
            if name.endswith(SUFFIX)
        }
        spent["event loop and program"] = max(wall - sum(spent.values()), 0.0)
        for stage, seconds in spent.items():
            each = seconds / (rounds * n) * 1e6
            bench.record(prefix + stage, each, unit="us", x=n)
            line = f"{prefix}{stage:24} {n:5} at once {each:10.2f} us  {seconds / wall:6.1%}"
            print(line, file=sys.stderr)
    return wall / (rounds * n) * 1e6


if __name__ == "__main__":
    main(ours=ours)
