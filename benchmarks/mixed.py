"""Requests of several kinds at once on vLLM: engine steps that a short one waits for a long one.

A step is one call of the engine's step hook: with draws under way, one forward pass. Steps are
counted where they can be, because a count does not depend on how busy the machine is. The model is
asked while one draw of 300 tokens is under way. `sgl_mixed` is the same on SGLang;
`hf_mixed` is about long prompts on transformers.
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "vllm"

SAMPLED_TOKENS = 300
DRAWS, TOKENS = 16, 50

ENGINE_OPTS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 64,
    "kv_cache_memory_bytes": 1 << 29,
}


def ours(bench: Bench) -> None:
    measure(bench, "vllm", {"engine_opts": ENGINE_OPTS})


def measure(bench: Bench, backend: str, options: dict[str, Any]) -> None:
    """Measure one backend."""
    from genlm.core import load_model_by_name

    steps = counter()
    lm = load_model_by_name(bench.model, backend, {**options, "wrappers": [steps]})
    repeat = 1 if bench.quick else 5
    random_ids = random.Random(0)

    def prompt() -> list[int]:
        return [random_ids.randrange(1000, 40000) for _ in range(20)]

    lm.next_token_logprobs_sync(prompt())

    async def during(ask: Callable[[], Awaitable[Any]]) -> int:
        """Steps from asking to the answer, with a long draw under way, which is then cancelled."""
        long = asyncio.ensure_future(lm.sample(prompt(), SAMPLED_TOKENS, []))
        await asyncio.to_thread(steps.wait_for, 5)
        before = steps.count
        await ask()
        waited = steps.count - before
        if long.done():
            waited = SAMPLED_TOKENS
        long.cancel()
        await asyncio.gather(long, return_exceptions=True)
        return waited

    async def first_of_two() -> int:
        before = steps.count
        long = asyncio.ensure_future(lm.sample(prompt(), 100, []))
        await lm.sample(prompt(), 1, [])
        waited = steps.count - before
        await long
        return waited

    async def draws() -> None:
        await asyncio.gather(*(lm.sample(prompt(), TOKENS, []) for _ in range(DRAWS)))

    cases = {
        "a row": lambda: lm.next_token_logprobs(prompt()),
        "a draw of one token": lambda: lm.sample(prompt(), 1, []),
        "a score of 20 tokens": lambda: lm.sequence_logprobs(prompt()[:3], prompt()),
    }
    for name, ask in cases.items():
        waited = [asyncio.run(during(ask)) for _ in range(repeat)]
        bench.record(f"{name} during a draw of {SAMPLED_TOKENS} tokens", waited, unit="steps")
    waited = [asyncio.run(first_of_two()) for _ in range(repeat)]
    case = "the first of a draw of 1 and one of 100 tokens asked together"
    bench.record(case, waited, unit="steps")
    bench.clock = time.process_time
    case = f"{DRAWS} draws of {TOKENS} tokens, per token (CPU time)"
    bench.time(case, lambda: asyncio.run(draws()), per=DRAWS * TOKENS, repeat=3)
    _measure_close(bench, lm, steps, prompt())


def _measure_close(bench: Bench, lm: Any, steps: Any, prompt: list[int]) -> None:
    """Steps that the engine makes after the model was closed, in the middle of a draw."""

    def draw() -> None:
        from genlm.core import ModelClosedError

        try:
            asyncio.run(lm.sample(prompt, SAMPLED_TOKENS, []))
        except ModelClosedError:
            return
        bench.note("close() during a draw: the draw ran to its end")

    thread = threading.Thread(target=draw)
    thread.start()
    steps.wait_for(5)
    before = steps.count
    lm.close()
    bench.record("close() during a draw", steps.count - before, unit="steps")
    thread.join()


def counter() -> Any:
    """A wrapper that counts an engine's steps."""
    from genlm.core import hookimpl

    class Steps:
        def __init__(self) -> None:
            self.count = 0
            self._begun = 0
            self._made = threading.Condition()

        @hookimpl
        def genlm_call_begins(self, hook: str) -> None:
            if hook == "genlm_step":
                with self._made:
                    self._begun += 1
                    self._made.notify_all()

        @hookimpl
        def genlm_call_ended(self, hook: str, error: object) -> None:
            if hook == "genlm_step" and error is None:
                with self._made:
                    self.count += 1
                    self._made.notify_all()

        def wait_for(self, more: int) -> None:
            with self._made:
                target = self.count + more
                self._made.wait_for(lambda: self.count >= target)

        def wait_for_one_more_to_begin(self) -> None:
            with self._made:
                target = self.count + 1
                self._made.wait_for(lambda: self._begun >= target)

    return Steps()


if __name__ == "__main__":
    main(ours=ours)
