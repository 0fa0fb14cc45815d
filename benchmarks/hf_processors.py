"""A step of 32 contexts on hf with a hook that changes rows and without one, in CPU time

The hook, ``genlm_process_logprobs``, returns its argument: the difference is what the core itself
spends on it. Both models take turns, step by step, in one process. ``temperature`` divides the
rows and normalises them again, which is a pass over them in PyTorch.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from benchmarks.protocol import Bench, main
from benchmarks.steps import Program, asked_of

PLUGIN = "hf"


def ours(bench: Bench) -> None:
    from genlm.core import hookimpl
    from genlm.hf import AsyncTransformer

    class Same:
        @hookimpl
        def genlm_process_logprobs(self, rows: Any) -> Any:
            return rows

    class Temperature:
        @hookimpl
        def genlm_process_logprobs(self, rows: Any) -> Any:
            return (rows / 0.7).log_softmax(-1)

    wrappers: dict[str, list[Any]] = {
        "no hook": [],
        "returns its argument": [Same()],
        "temperature": [Temperature()],
    }
    with contextlib.ExitStack() as stack, asyncio.Runner() as runner:
        asks = {}
        for case, given in wrappers.items():
            lm = stack.enter_context(
                AsyncTransformer.from_name(bench.model, cache_size=0, wrappers=given)
            )
            asks[case] = asked_of(lm, runner)
        program = Program(len(lm.byte_vocab), n=32, length=20)
        contexts = program.prompts()
        seconds: dict[str, list[float]] = {case: [] for case in asks}
        for turn in range(6 if bench.quick else 44):
            for case, ask in asks.items():
                began = time.process_time()
                ask(contexts)
                # The first turns include the prompts and everything that is made once.
                if turn >= 4:
                    seconds[case].append((time.process_time() - began) * 1e3)
            contexts = program.extend(contexts)
    for case, values in seconds.items():
        bench.record(case, values, unit="ms", x=program.n)


if __name__ == "__main__":
    main(ours=ours)
