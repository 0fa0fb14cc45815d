"""Random programs on two models in one process, one of which is closed in the middle of its work
and loaded again."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import torch
from structlog.testing import capture_logs

from genlm.core import AsyncLM, ModelClosedError
from genlm.vllm import AsyncVirtualLM

#: Prompts in chunks, contexts of several blocks, a cache of about a thousand tokens.
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": 1 << 20,
}
ATOL = 5e-4
PATIENCE = 300.0  # seconds for a round, else something hangs
COMPARED = 8  # of a round

#: A result: what of a row is to be, and the context that it follows.
Result = tuple[tuple[int, ...], torch.Tensor, int | None]


def fuzz(path: str, seed: int, seconds: float, say: Callable[[str], None]) -> int:
    """How many results were compared with cold rows.

    Raises:
        AssertionError: a result is wrong, lost, or not the error it should be; or a step failed.
    """
    dice, compared, rounds = random.Random(seed), 0, 0
    until = time.monotonic() + seconds
    models = [load(path), load(path)]
    try:
        with capture_logs() as logs:
            while time.monotonic() < until:
                closed = dice.randrange(2)
                compared += asyncio.run(one_round(dice, models[closed], models[1 - closed]))
                assert not [each for each in logs if each["event"] == "vllm.failed"], logs
                models[closed] = load(path)
                rounds += 1
    finally:
        for model in models:
            model.close()
    say(f"{rounds} rounds, {compared} results compared")
    return compared


def load(path: str) -> AsyncLM:
    return AsyncVirtualLM.from_name(path, engine_opts=OPTIONS, cache_size=0)


async def one_round(dice: random.Random, victim: AsyncLM, other: AsyncLM) -> int:
    """Work for both; the victim is closed once a part of it is done."""
    work, ended = Work(dice), asyncio.Queue[None]()
    tasks = {lm: [asyncio.ensure_future(each) for each in work.on(lm)] for lm in (victim, other)}
    for task in (*tasks[victim], *tasks[other]):
        task.add_done_callback(lambda _: ended.put_nowait(None))
    async with asyncio.timeout(PATIENCE):
        for _ in range(dice.randrange(len(tasks[victim]))):
            await ended.get()
        await asyncio.to_thread(victim.close)
        of_victim = await asyncio.gather(*tasks[victim], return_exceptions=True)
        results = [each for some in await asyncio.gather(*tasks[other]) for each in some]
        unexpected = [
            each
            for each in of_victim
            if isinstance(each, BaseException) and not isinstance(each, ModelClosedError)
        ]
        assert not unexpected, unexpected
        # Those that the victim has given are the same model's.
        results += [each for some in of_victim if isinstance(some, list) for each in some]
    chosen = dice.sample(results, min(COMPARED, len(results)))
    for context, result, token in chosen:
        cold = await asyncio.to_thread(other.next_token_logprobs_uncached, list(context))
        right = cold if token is None else cold[token]
        torch.testing.assert_close(result, right, atol=ATOL, rtol=0)
    return len(chosen)


class Work:
    """Programs over contexts that share their beginnings."""

    def __init__(self, dice: random.Random) -> None:
        self._dice = dice
        self._prompts = [self._tokens(dice.choice([1, 20, 31, 32, 33, 60, 150])) for _ in range(3)]

    def on(self, lm: AsyncLM) -> list[Coroutine[Any, Any, list[Result]]]:
        kinds = self._dice.choices(
            [self.grow, self.draw, self.score, self.cancel], [4, 3, 1, 1], k=9
        )
        return [kind(lm, random.Random(self._dice.random())) for kind in kinds]

    async def grow(self, lm: AsyncLM, dice: random.Random) -> list[Result]:
        """A population that forks at every step."""
        contexts, results = [dice.choice(self._prompts)] * dice.randrange(1, 7), []
        for _ in range(dice.randrange(1, 12)):
            contexts = [
                (*dice.choice(contexts), *self._tokens(dice.choice([1, 1, 1, 7]))) for _ in contexts
            ]
            rows = await asyncio.gather(*(lm.next_token_logprobs(each) for each in contexts))
            results += [(each, row, None) for each, row in zip(contexts, rows, strict=True)]
        return results

    async def draw(self, lm: AsyncLM, dice: random.Random) -> list[Result]:
        prompt = (*dice.choice(self._prompts)[: dice.randrange(1, 60)], *self._tokens(3))
        count, seed = dice.randrange(1, 60), dice.choice([None, dice.randrange(100)])
        drawn = await lm.sample(prompt, count, [], seed=seed)
        assert len(drawn) == count
        return []

    async def score(self, lm: AsyncLM, dice: random.Random) -> list[Result]:
        prompt, continuation = dice.choice(self._prompts), self._tokens(dice.choice([1, 5, 70]))
        scores = await lm.sequence_logprobs(prompt, continuation)
        at = dice.randrange(len(continuation))
        return [(prompt + continuation[:at], scores[at], continuation[at])]

    async def cancel(self, lm: AsyncLM, dice: random.Random) -> list[Result]:
        asked: list[Awaitable[Any]] = [
            asyncio.ensure_future(lm.next_token_logprobs(dice.choice(self._prompts))),
            asyncio.ensure_future(lm.sample(dice.choice(self._prompts), 50, [], seed=1)),
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in asked:
            task.cancel()  # type: ignore[attr-defined]
        await asyncio.gather(*asked, return_exceptions=True)
        return []

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._dice.choices(range(1000, 40000), k=count))
