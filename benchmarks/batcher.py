"""The batcher's own cost: an engine that answers at once, and one that takes half a second

Requests are asked together, each with a context of 50 tokens never asked before. A held event loop
is how late a coroutine that wants to run every millisecond is at worst, while a forward pass of 500
ms is under way.

genlm-backend does its batching in each backend; here it is that of its hf backend, over a model
that answers at once. The floor is Python's own: coroutines gathered, whose futures one other thread
resolves together.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

TOGETHER = (1, 32, 1000)
LENGTHS = (50, 2_000, 32_000)
VOCABULARY = 258
FORWARD_SECONDS = 0.5

Ask = Callable[[list[int]], Coroutine[Any, Any, Any]]


def fresh(length: int, fill: int = 1) -> Iterator[list[int]]:
    """Contexts of ``length`` tokens, no two alike, nor one like any of another ``fill``."""
    for number in itertools.count():
        yield [number % 250, number // 250 % 250, number // 62_500, *[fill] * (length - 3)]


def together(bench: Bench, case: str, ask: Ask, runner: asyncio.Runner, most: int = 1000) -> None:
    source = fresh(50)

    async def gathered(contexts: list[list[int]]) -> None:
        await asyncio.gather(*map(ask, contexts))

    for n in TOGETHER:
        if n <= most:
            bench.time(
                case,
                lambda contexts: runner.run(gathered(contexts)),
                unit="us",
                x=n,
                per=n,
                prepare=lambda n=n: list(itertools.islice(source, n)),
                repeat=100 if n < 1000 else 30,
            )


def waiting(bench: Bench, lm: Any, runner: asyncio.Runner) -> None:
    """Many requests at once, of which an engine takes eight at a time: rows only, and rows with
    samples."""

    async def ask(contexts: list[list[int]], mixed: bool) -> None:
        await asyncio.gather(
            *(
                lm.sample(ids, 1, []) if mixed and i % 2 else lm.next_token_logprobs(ids)
                for i, ids in enumerate(contexts)
            )
        )

    source = fresh(3, fill=3)
    for mixed, case in (
        (False, "eight at a time, rows"),
        (True, "eight at a time, mixed"),
    ):
        for n in (2_000, 64_000):
            bench.time(
                case,
                lambda contexts, mixed=mixed: runner.run(ask(contexts, mixed)),
                unit="us",
                x=n,
                per=n,
                prepare=lambda n=n: list(itertools.islice(source, n)),
                repeat=1 if bench.quick else 3,
            )


def held(bench: Bench, ask: Ask, runner: asyncio.Runner) -> None:
    """The longest time for which the event loop is blocked during one forward pass."""

    async def latest() -> float:
        answer = asyncio.ensure_future(ask(next(source)))
        worst = 0.0
        while not answer.done():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            worst = max(worst, time.perf_counter() - began - 0.001)
        return worst * 1e3

    source = fresh(50, fill=2)  # contexts that are new, and no prefixes of earlier ones
    bench.record(
        "event loop held, forward of 500 ms", [runner.run(latest()) for _ in range(5)], unit="ms"
    )


def ours(bench: Bench) -> None:
    import torch

    from genlm.core import AsyncLM, hookimpl
    from genlm.core.mock import ByteTokenizer

    class Instant:
        """Answers at once, or after a while."""

        tokenizer, vocab_size, max_context, device, model = (
            ByteTokenizer(),
            VOCABULARY,
            None,
            "cpu",
            None,
        )

        def __init__(self, seconds: float = 0.0) -> None:
            self._rows = torch.log_softmax(torch.randn(max(TOGETHER), VOCABULARY), dim=-1)
            self._seconds = seconds

        @hookimpl
        def genlm_next_token_logprobs(self, queries: Any) -> Any:
            if self._seconds:
                time.sleep(self._seconds)
            return self._rows[: len(queries)]

        @hookimpl
        def genlm_sample(self, queries: Any, params: Any) -> list[list[int]]:
            return [[1]] * len(queries)

    with asyncio.Runner() as runner:
        for cache_size, case in ((0, "request, cache off"), (None, "request, cache on")):
            with AsyncLM(Instant, backend="instant", cache_size=cache_size) as lm:
                together(bench, case, lm.next_token_logprobs, runner)
        with AsyncLM(Instant, backend="instant", cache_size=0, batch_size=8) as lm:
            waiting(bench, lm, runner)
        with AsyncLM(lambda: Instant(FORWARD_SECONDS), backend="slow") as lm:
            held(bench, lm.next_token_logprobs, runner)
        with AsyncLM(Instant, backend="instant", cache_size=0) as lm:

            async def many(contexts: list[Any]) -> None:
                await asyncio.gather(*map(lm.next_token_logprobs, contexts))

            for length in LENGTHS:
                lists = list(itertools.islice(fresh(length), 32))
                known = [lm.context(ids) for ids in lists]
                for case, extended in (
                    (
                        "extend a list, cache off, length",
                        lambda lists=lists: [[*ids, 5] for ids in lists],
                    ),
                    (
                        "extend a Context, cache off, length",
                        lambda known=known: [context.extend(5) for context in known],
                    ),
                ):
                    bench.time(
                        case,
                        lambda make=extended: runner.run(many(make())),
                        unit="us",
                        x=length,
                        per=32,
                    )


def theirs(bench: Bench) -> None:
    import torch

    from genlm.backend.llm import AsyncTransformer

    class Instant:
        """As much of a transformers model as the backend touches."""

        device = torch.device("cpu")
        seconds = 0.0

        def eval(self) -> None: ...

        def __call__(self, ids: Any, **more: Any) -> Any:
            if self.seconds:
                time.sleep(self.seconds)
            return type(
                "Output",
                (),
                {"logits": rows[:1].expand(len(ids), ids.shape[1], -1), "past_key_values": None},
            )

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(bench.model)
    rows = torch.randn(1, VOCABULARY)
    model: Any = Instant()
    with asyncio.Runner() as runner:
        lm = AsyncTransformer(model, tokenizer)
        together(bench, "request, cache on", lm.next_token_logprobs, runner)
        model.seconds = FORWARD_SECONDS
        held(bench, lm.next_token_logprobs, runner)
    bench.note(
        "genlm-backend's hf backend waits 20 ms for others before it answers a lone request; it "
        "takes 20 in a batch."
    )


def floor(bench: Bench) -> None:
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve(futures: list[asyncio.Future[None]]) -> None:
        for future in futures:
            future.set_result(None)

    def serve() -> None:
        while (work := asked.get()) is not None:
            loop, futures = work
            loop.call_soon_threadsafe(resolve, futures)

    thread = threading.Thread(target=serve)
    thread.start()
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        for n in TOGETHER:

            async def gathered(n: int = n) -> None:
                futures: list[asyncio.Future[None]] = []

                async def ask() -> None:
                    futures.append(loop.create_future())
                    if len(futures) == n:
                        asked.put((loop, futures))
                    await futures[-1]

                await asyncio.gather(*(ask() for _ in range(n)))

            for case in ("request, cache off", "request, cache on"):
                bench.time(
                    case,
                    lambda: runner.run(gathered()),
                    unit="us",
                    x=n,
                    per=n,
                    repeat=100 if n < 1000 else 30,
                )
    asked.put(None)
    thread.join()


if __name__ == "__main__":
    main(ours=ours, theirs=theirs, floor=floor)
