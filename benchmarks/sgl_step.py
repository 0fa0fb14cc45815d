"""One step of n contexts through SGLang: each longer by one token than a context asked before.

The floor is one decode of the same rows by transformers, the key/value state being there. The backend's step is also split
into the model's forward pass, the rest of what SGLang's scheduler does, and what the core and the plugin add to both.
``genlm-backend`` 0.3.1 does not run on the SGLang release that this environment has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "sgl"

LENGTHS = (20, 200)
CONTEXTS = (1, 8, 32)

#: The steps of SGLang's own event loop.
SCHEDULER_STEPS = ("process_input_requests", "get_next_batch_to_run", "run_batch", "process_batch_result")


class Stopwatch:
    """Adds up the seconds spent inside the calls that it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - began

        return timed


def workloads(bench: Bench, vocabulary: int) -> Iterator[tuple[str, int, int, list[list[int]]]]:
    """The case, the number of contexts, how often to repeat, and random contexts with no common beginning."""
    import torch

    for length in LENGTHS[:1] if bench.quick else LENGTHS:
        for n in CONTEXTS:
            source = torch.Generator().manual_seed(1000 * n + length)
            prompts = torch.randint(vocabulary, (n, length), generator=source).tolist()
            yield f"step after {length} tokens", n, 2 if bench.quick else 15, prompts


def ours(bench: Bench) -> None:
    import asyncio

    from sglang.srt.managers.scheduler import Scheduler

    from genlm.sgl import AsyncSGLTransformer

    scheduler, forward = Stopwatch(), Stopwatch()
    for name in SCHEDULER_STEPS:
        setattr(Scheduler, name, scheduler.around(getattr(Scheduler, name)))
    with AsyncSGLTransformer.from_name(bench.model, cache_size=0) as lm:
        lm.underlying_model.forward = forward.around(lm.underlying_model.forward)

        async def step(contexts: list[list[int]]) -> tuple[float, float, float]:
            began = time.perf_counter(), scheduler.seconds, forward.seconds
            await asyncio.gather(*(lm.next_token_logprobs(context) for context in contexts))
            ended = time.perf_counter(), scheduler.seconds, forward.seconds
            wall, in_scheduler, in_forward = (end - begin for begin, end in zip(began, ended, strict=True))
            return wall, in_scheduler, in_forward

        async def steps(prompts: list[list[int]], repeat: int) -> list[tuple[float, float, float]]:
            await step(prompts)
            taken = [await step([[*prompt, token] for prompt in prompts]) for token in range(repeat + 1)]
            return taken[1:]

        for case, n, repeat, prompts in workloads(bench, len(lm.byte_vocab)):
            taken = asyncio.run(steps(prompts, repeat))
            bench.record(case, [1e3 * wall for wall, _, _ in taken], unit="ms", x=n)
            bench.record(f"{case}: forward", [1e3 * model for _, _, model in taken], unit="ms", x=n)
            bench.record(
                f"{case}: SGLang without forward", [1e3 * (own - model) for _, own, model in taken], unit="ms", x=n
            )
            bench.record(f"{case}: core and plugin", [1e3 * (wall - own) for wall, own, _ in taken], unit="ms", x=n)


def floor(bench: Bench) -> None:
    import copy
    import functools

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bench.model, dtype=torch.float32).eval()
    with torch.inference_mode():
        for case, n, repeat, prompts in workloads(bench, model.config.vocab_size):
            state = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1).past_key_values

            def decode(state: Any, n: int = n) -> None:
                logits = model(torch.zeros(n, 1, dtype=torch.long), past_key_values=state, logits_to_keep=1).logits
                logits[:, -1].log_softmax(dim=-1)

            mine = functools.partial(copy.deepcopy, state)  # a decode writes into it
            bench.time(case, decode, unit="ms", x=n, repeat=repeat, prepare=mine)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
