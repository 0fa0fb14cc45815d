"""One step of n contexts through vLLM: each longer by one token than a context asked before.

With live sessions vLLM decodes one token per context. Without them every step is a new request, which finds the full blocks
of its context in the prefix cache and computes the rest; the same requests through `LLM.generate`, which gives no row; with
the rows captured; and with `logprobs=-1`, vLLM's own way to full rows. All five take turns step by step in one process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "vllm"

LENGTH = 68
CONTEXTS = (1, 8, 32)
ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 512 << 20}
RAW = {"block_size": 32, "enforce_eager": True, "max_logprobs": -1, "async_scheduling": False, "seed": 0}

Contexts = list[list[int]]


def ours(bench: Bench) -> None:
    from genlm.core import AsyncLM
    from genlm.vllm import AsyncVirtualLM

    with (
        AsyncVirtualLM.from_name(bench.model, ENGINE, cache_size=0) as live,
        AsyncVirtualLM.from_name(bench.model, ENGINE, live_sessions=False, cache_size=0) as fresh,
    ):
        plain = generators(bench.model)

        async def gathered(lm: AsyncLM, contexts: Contexts) -> None:
            await asyncio.gather(*map(lm.next_token_logprobs, contexts))

        ways: dict[str, Callable[[Contexts], object]] = {
            "live sessions": lambda contexts: asyncio.run(gathered(live, contexts)),
            "a new request per step": lambda contexts: asyncio.run(gathered(fresh, contexts)),
            **plain,
        }
        for n in CONTEXTS:
            measure(bench, ways, live, n, len(live.byte_vocab))


def measure(bench: Bench, ways: dict[str, Callable[[Contexts], object]], live: Any, n: int, vocabulary: int) -> None:
    """Step all ways in turn; of live sessions also what is not spent in vLLM."""
    import torch

    contexts = torch.randint(vocabulary, (n, LENGTH), generator=torch.Generator().manual_seed(n)).tolist()
    taken: dict[str, list[float]] = {way: [] for way in ways}
    added = []
    for step in range(4 if bench.quick else 22):
        for way, ask in ways.items():
            began, in_engine = time.perf_counter(), live.stats.engine_seconds
            ask(contexts)
            wall = 1e3 * (time.perf_counter() - began)
            taken[way].append(wall)
            if way == "live sessions":
                added.append(wall - 1e3 * (live.stats.engine_seconds - in_engine))
        contexts = [[*context, 1000 + step] for context in contexts]
    for way, times in taken.items():
        bench.record(f"{LENGTH} tokens: {way}", times[2:], unit="ms", x=n)
    bench.record(f"{LENGTH} tokens: live sessions, added by the core", added[2:], unit="ms", x=n)


def generators(model: str) -> dict[str, Callable[[Contexts], object]]:
    """Plain vLLM: the same requests without rows, with rows captured, and with rows by ``logprobs=-1``."""
    import itertools
    import os

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from genlm.vllm.capture import ROW_KEY, RowStore, capture_into

    store = RowStore()
    llm = LLM(model, logits_processors=[capture_into(store)], **ENGINE, **RAW)
    keys = itertools.count()

    def params(**more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, **more)

    def generate(contexts: Contexts, wishes: list[SamplingParams]) -> None:
        prompts: Any = [{"prompt_token_ids": context} for context in contexts]
        llm.generate(prompts, wishes, use_tqdm=False)

    def captured(contexts: Contexts) -> None:
        asked = [next(keys) for _ in contexts]
        generate(contexts, [params(extra_args={ROW_KEY: key}) for key in asked])
        store.take(asked)

    return {
        "LLM.generate": lambda contexts: generate(contexts, [params() for _ in contexts]),
        "LLM.generate, rows captured": captured,
        "LLM.generate, logprobs=-1": lambda contexts: generate(contexts, [params(logprobs=-1) for _ in contexts]),
    }


if __name__ == "__main__":
    main(ours=ours)
