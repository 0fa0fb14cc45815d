"""float32 and bfloat16 on this processor: a step of hf

Contexts of 20 tokens that grow by one, in one batch; CPU time of a step. bfloat16 is faster where
the processor has instructions for it (AVX512-BF16, AMX), and slower where it is emulated.
"""

from __future__ import annotations

import asyncio
import random
import time
from functools import partial
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SIZES = (1, 8, 32, 64)
LENGTH = 20


def ours(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    bench.clock = time.process_time
    source = random.Random(0)
    models = {
        dtype: load_model_by_name(bench.model, "hf", {"dtype": dtype, "cache_size": 0})
        for dtype in ("float32", "bfloat16")
    }
    for size in SIZES:
        contexts = [[source.randrange(1000) for _ in range(LENGTH)] for _ in range(size)]
        for dtype, lm in models.items():  # in turns, so a slow minute is slow for both
            bench.time(f"a step, {dtype}", partial(step, lm, contexts), x=size, repeat=10)
    for lm in models.values():
        lm.close()


def step(lm: Any, contexts: list[list[int]]) -> None:
    """Every context grows by a token, and is asked."""
    for context in contexts:
        context.append(len(context))
    asyncio.run(lm.batch_next_token_logprobs(contexts))


if __name__ == "__main__":
    main(ours=ours)
