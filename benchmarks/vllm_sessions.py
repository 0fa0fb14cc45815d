"""Live sessions of vLLM against its other ways

A step asks n contexts, each longer by one token than one asked before.

With live sessions vLLM decodes one token per context. Without them every step is a new request,
which finds the full blocks of its context in the prefix cache and computes the rest: 1 to 32
tokens, so the contexts grow from 68 tokens by one whole block, and no place in it is favoured. The
same requests go through `LLM.generate`, which gives no row; with the rows captured; and with
`logprobs=-1`, vLLM's own way to full rows. All five take turns step by step in one process, and
ratios are of one step each.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.protocol import Bench, main

if TYPE_CHECKING:
    from genlm.core import AsyncLM

PLUGIN = "vllm"

CONTEXT_TOKENS = 68
CONTEXTS = (1, 8, 32)
BLOCK_TOKENS = 32
ENGINE = {"max_model_len": 512, "dtype": "float32", "kv_cache_memory_bytes": 512 << 20}
RAW = {
    "block_size": BLOCK_TOKENS,
    "enforce_eager": True,
    "max_logprobs": -1,
    "async_scheduling": False,
    "seed": 0,
}

LIVE, FRESH = "live sessions", "a new request per step"
PLAIN, CAPTURED, EVERY = "LLM.generate", "LLM.generate, rows captured", "LLM.generate, logprobs=-1"

Contexts = list[list[int]]
Way = Callable[[Contexts], object]


def ours(bench: Bench) -> None:
    import torch

    from genlm.vllm import AsyncVirtualLM

    with (
        AsyncVirtualLM.from_name(bench.model, ENGINE, cache_size=0) as live,
        AsyncVirtualLM.from_name(bench.model, ENGINE, live_sessions=False, cache_size=0) as fresh,
        asyncio.Runner() as runner,
    ):
        ways = {
            LIVE: gathered(live, runner),
            FRESH: gathered(fresh, runner),
            **generators(bench.model),
        }
        for n in CONTEXTS:
            source = torch.Generator().manual_seed(n)
            contexts = torch.randint(
                len(live.byte_vocab), (n, CONTEXT_TOKENS), generator=source
            ).tolist()
            times, added = stepped(ways, live, contexts, steps=2 if bench.quick else BLOCK_TOKENS)
            report(bench, n, times, added)


def stepped(
    ways: dict[str, Way], live: AsyncLM, contexts: Contexts, steps: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Milliseconds of each step, by way, after two that are not counted; and of live sessions those
    not spent in vLLM."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    added = []
    for step in range(2 + steps):
        for way, ask in ways.items():
            in_engine, began = live.stats.engine_seconds, time.perf_counter()
            ask(contexts)
            wall = time.perf_counter() - began
            times[way].append(1e3 * wall)
            if way == LIVE:
                added.append(1e3 * (wall - (live.stats.engine_seconds - in_engine)))
        contexts = [[*context, 1000 + step] for context in contexts]
    return {way: values[2:] for way, values in times.items()}, added[2:]


def report(bench: Bench, n: int, times: dict[str, list[float]], added: Sequence[float]) -> None:
    for way, values in times.items():
        bench.record(way, values, unit="ms", x=n)
    bench.record("live sessions, added by the core", added, unit="ms", x=n)
    for way in (FRESH, EVERY):
        faster = f"live sessions are faster than {way}"
        bench.record(faster, ratios(times[way], times[LIVE]), unit="times", x=n)
    overhead = [100 * (ratio - 1) for ratio in ratios(times[CAPTURED], times[PLAIN])]
    bench.record("capturing rows adds to LLM.generate", overhead, unit="%", x=n)


def ratios(of: Sequence[float], to: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(of, to, strict=True)]


def gathered(lm: AsyncLM, runner: asyncio.Runner) -> Way:
    """Request all rows at once, each by a coroutine of its own."""

    async def gather(contexts: Contexts) -> None:
        await asyncio.gather(*map(lm.next_token_logprobs, contexts))

    return lambda contexts: runner.run(gather(contexts))


def generators(model: str) -> dict[str, Way]:
    """Plain vLLM: the same requests without rows, with rows captured, and with rows by
    ``logprobs=-1``."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams

    from genlm.vllm.capture import ROW_KEY, RowStore, capture_into

    store = RowStore()
    llm = LLM(model, logits_processors=[capture_into(store)], **ENGINE, **RAW)
    keys = itertools.count()

    def params(**more: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, **more
        )

    def generate(contexts: Contexts, wishes: list[SamplingParams]) -> None:
        prompts: Any = [{"prompt_token_ids": context} for context in contexts]
        llm.generate(prompts, wishes, use_tqdm=False)

    def captured(contexts: Contexts) -> None:
        asked = [next(keys) for _ in contexts]
        generate(contexts, [params(extra_args={ROW_KEY: key}) for key in asked])
        store.take(asked)

    return {
        PLAIN: lambda contexts: generate(contexts, [params() for _ in contexts]),
        CAPTURED: captured,
        EVERY: lambda contexts: generate(contexts, [params(logprobs=-1) for _ in contexts]),
    }


if __name__ == "__main__":
    main(ours=ours)
