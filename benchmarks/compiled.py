"""torch.compile on this processor: a step of hf with it and without

Contexts of 20 tokens that grow by one, in one batch; CPU time of a step. Both models take turns.
``compile_opts`` is ``{"dynamic": True}``. The first forward of a size includes compiling for it.
"""

from __future__ import annotations

import random
import time
from functools import partial

from benchmarks.dtype import LENGTH, step
from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SIZES = (1, 8, 32)


def ours(bench: Bench) -> None:
    from genlm.core import load_model_by_name

    bench.clock = time.process_time
    source = random.Random(0)
    options = {"plain": {}, "compiled": {"compile_opts": {"dynamic": True}}}
    models = {
        name: load_model_by_name(bench.model, "hf", {"cache_size": 0, **given})
        for name, given in options.items()
    }
    for size in SIZES:
        contexts = [[source.randrange(1000) for _ in range(LENGTH)] for _ in range(size)]
        began = time.perf_counter()
        step(models["compiled"], contexts)
        bench.record("first forward, compiled", time.perf_counter() - began, unit="s", x=size)
        for name, lm in models.items():
            bench.time(f"a step, {name}", partial(step, lm, contexts), x=size, repeat=10)
    for lm in models.values():
        lm.close()


if __name__ == "__main__":
    main(ours=ours)
