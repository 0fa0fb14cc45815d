"""float32, bfloat16 and torch.compile on this processor: a step of hf

Contexts of 20 tokens that grow by one, in one batch; CPU time of a step. bfloat16 is faster where
the processor has instructions for it (AVX512-BF16, AMX), and slower where it is emulated. The
compiled model has `compile_opts={"dynamic": True}`, without what earlier runs have compiled. It is
compiled in other processes, mostly while the model is loaded, and once more in the first step, of
new contexts. Both are given apart, in wall time.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from functools import partial
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SIZES = (1, 8, 32, 64)
CONTEXT_TOKENS = 20

COMPILED = "float32, compiled"
SIZE_COMPILED = 32  # only one size, because compiling for each would take minutes
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    COMPILED: {"dtype": "float32", "compile_opts": {"dynamic": True}},
}


def ours(bench: Bench) -> None:
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    from genlm.core import load_model_by_name

    bench.clock = time.process_time
    source = random.Random(0)
    models = {}
    for name, options in KINDS.items():
        begun = time.perf_counter()
        models[name] = load_model_by_name(bench.model, "hf", {"cache_size": 0, **options})
        if name == COMPILED:
            bench.record(f"the load, {name}", [time.perf_counter() - begun], unit="s")
    for size in SIZES[:2] if bench.quick else SIZES:
        contexts = [[source.randrange(1000) for _ in range(CONTEXT_TOKENS)] for _ in range(size)]
        if size == SIZE_COMPILED:
            begun = time.perf_counter()
            step(models[COMPILED], contexts)
            taken = time.perf_counter() - begun
            bench.record(f"the first step, {COMPILED}", [taken], unit="s", x=size)
        # The models take turns, so that a slow minute slows all of them.
        for name, lm in models.items():
            if name != COMPILED or size == SIZE_COMPILED:
                bench.time(f"a step, {name}", partial(step, lm, contexts), x=size, repeat=10)
    for lm in models.values():
        lm.close()


def step(lm: Any, contexts: list[list[int]]) -> None:
    """Extend every context by a token, and request its row."""
    for context in contexts:
        context.append(len(context))
    asyncio.run(lm.batch_next_token_logprobs(contexts))


if __name__ == "__main__":
    main(ours=ours)
