"""n contexts behind one prompt through transformers, in CPU time with one thread.

``shared``: each grows by a token in every step. ``resample``: and every ten steps their parents are
chosen anew, with repetition; 0 is without. Memory is what the process has more than once the model
is loaded, with what the cases before left to the allocator.

The floor is raw transformers: one ``model(...)`` on a prepared cache with a copy of the prompt for
every context, and log-softmax. Its first step is the prefill of one prompt and such a step.
``genlm-backend`` 0.3.1 is given the prompt by ``cache_kv``, which counts in its first step; without
it, a step takes minutes.
"""

from __future__ import annotations

import asyncio
import functools
import time

from benchmarks.protocol import Bench, main
from benchmarks.steps import (
    COPIED,
    Program,
    asked_of,
    measure_resampled,
    measure_shared,
    transformers_model,
)

PLUGIN = "hf"


def ours(bench: Bench) -> None:
    from genlm.hf import AsyncTransformer

    bench.clock = time.process_time
    with AsyncTransformer.from_name(bench.model, cache_size=0) as lm, asyncio.Runner() as runner:
        ask, size = asked_of(lm, runner), len(lm.byte_vocab)
        measure_shared(bench, size, ask, lm.clear_kv_cache)
        measure_resampled(bench, size, ask, lm.clear_kv_cache)


def theirs(bench: Bench) -> None:
    import torch

    from genlm.backend.llm import AsyncTransformer

    bench.clock = time.process_time
    lm = AsyncTransformer.from_name(
        bench.model, hf_opts={"torch_dtype": torch.float32, "device_map": "cpu"}
    )
    with asyncio.Runner() as runner:
        ask, size = asked_of(lm, runner), len(lm.byte_vocab)
        measure_shared(bench, size, ask, lm.clear_cache, COPIED, repeat=2, give=lm.cache_kv)


def floor(bench: Bench) -> None:
    import torch

    bench.clock = time.process_time
    run, size = transformers_model(bench)
    with torch.inference_mode():
        for n, length in COPIED[:1] if bench.quick else COPIED:
            behind = f"shared, {n} contexts behind one prompt"
            prompt = Program(size, n, length).prompts(1)
            prefill = functools.partial(run, prompt)
            state = run(prompt)
            state.batch_repeat_interleave(n)
            # Decoding writes into the state's own cache.
            decode = functools.partial(run, [[5]] * n, state)
            alone = bench.time("prefill of the prompt", prefill, x=length, repeat=2)
            step = bench.time(behind, decode, x=length, repeat=6)
            bench.record(f"{behind}: first step", alone + step, unit="ms", x=length)
            del state, decode


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
