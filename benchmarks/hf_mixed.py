"""Short requests on transformers while a prompt of 4,000 tokens is computed.

A chunk is one call of the engine's step hook. Two programs, each alone and both at once: one
prompt, and 8 contexts that grow by a token in every step. Times are CPU time.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

from benchmarks.mixed import counter
from benchmarks.protocol import Bench, main

PLUGIN = "hf"

PROMPT_TOKENS = 4000
CONTEXTS, GROWTH = 8, 30
SIZES = (2048, 512)


def ours(bench: Bench) -> None:
    for size in SIZES[1:] if bench.quick else SIZES:
        measure(bench, size)


def measure(bench: Bench, size: int) -> None:
    """Measure with chunks of ``size`` tokens."""
    from genlm.core import load_model_by_name

    chunks = counter()
    options = {"max_batch_tokens": size, "cache_size": 0, "wrappers": [chunks]}
    lm = load_model_by_name(bench.model, "hf", options)
    repeat = 1 if bench.quick else 2
    of_size = f", chunks of {size} tokens"
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(1000, 40000) for _ in range(count)]

    async def prompt() -> None:
        await lm.next_token_logprobs(tokens(PROMPT_TOKENS))

    async def rows() -> None:
        contexts = [tokens(20) for _ in range(CONTEXTS)]
        for _ in range(GROWTH):
            await asyncio.gather(*map(lm.next_token_logprobs, contexts))
            contexts = [context + tokens(1) for context in contexts]

    async def both() -> None:
        await asyncio.gather(prompt(), rows())

    async def during() -> int:
        """How many chunks pass from requesting a short row, in the middle of the first chunk, to
        its answer."""
        long = asyncio.ensure_future(prompt())
        await asyncio.to_thread(chunks.wait_for_one_more_to_begin)
        before = chunks.count
        await lm.next_token_logprobs(tokens(20))
        waited = chunks.count - before
        if long.done():
            bench.note("the prompt was there before the short row")
        await long
        return waited

    def seconds(program: Any) -> float:
        lm.clear_kv_cache()
        began = time.process_time()
        asyncio.run(program())
        return time.process_time() - began

    seconds(prompt)  # this first row is compared with a cold one
    waited = [asyncio.run(during()) for _ in range(repeat)]
    bench.record(
        f"a row during a prompt of {PROMPT_TOKENS} tokens" + of_size, waited, unit="chunks"
    )
    taken: dict[Any, list[float]] = {prompt: [], rows: [], both: []}
    for _ in range(repeat):
        for program, values in taken.items():
            values.append(seconds(program))
    bench.record(f"a prompt of {PROMPT_TOKENS} tokens" + of_size, taken[prompt], unit="s")
    bench.record(f"{GROWTH} steps of {CONTEXTS} contexts" + of_size, taken[rows], unit="s")
    bench.record("both at once" + of_size, taken[both], unit="s")
    bench.record(
        "both at once, against their sum apart" + of_size,
        [c / (a + b) for a, b, c in zip(*taken.values(), strict=True)],
        unit="times",
    )
    lm.close()


if __name__ == "__main__":
    main(ours=ours)
