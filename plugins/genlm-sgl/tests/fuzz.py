"""Random programs with LoRA adapters that come and go while others are at work, against
transformers and PEFT."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from sgl_torch_cpu import without_pinned_memory

from genlm.core import AsyncLM
from genlm.sgl import AsyncSGLTransformer

#: More adapters than a batch may have, prompts in chunks, a pool that is full at times.
OPTIONS = {
    "enable_lora": True,
    "max_loras_per_batch": 2,
    "chunked_prefill_size": 64,
    "max_total_tokens": 2048,
    "max_running_requests": 24,
}
ATOL = 2e-3  # of log-probabilities
PATIENCE = 300.0  # seconds for a round, else something hangs
PROGRAMS, COMPARED = 9, 16  # of a round
TOKENS = 257  # of the tokenizer
PINNED = 64  # at most of a prompt: what is pinned stays until the end of the round

Tokens = tuple[int, ...]

#: A row, the context that it follows, and the kind of adapter that it is asked with.
Result = tuple[Tokens, str | None, torch.Tensor]


class Oracle:
    """Rows as transformers and PEFT compute them.

    Args:
        model: The folder of the model.
        adapters: The folders of its adapters, by kind.
        width: The tokens of the tokenizer; the model's rows may be wider.
    """

    def __init__(self, model: str, adapters: Mapping[str, str], width: int) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        (first, folder), *others = adapters.items()
        base = AutoModelForCausalLM.from_pretrained(model)
        self._model = PeftModel.from_pretrained(base, folder, adapter_name=first).eval()
        for kind, another in others:
            self._model.load_adapter(another, adapter_name=kind)
        self._width = width

    @torch.no_grad()
    def row(self, context: Tokens, kind: str | None) -> torch.Tensor:
        """The row, ``[width]``, of a context with an adapter or without."""
        ids = torch.tensor([context])
        if kind is None:
            with self._model.disable_adapter():
                logits = self._model(ids).logits
        else:
            self._model.set_adapter(kind)
            logits = self._model(ids).logits
        return logits[0, -1, : self._width].log_softmax(dim=-1)


def fuzz(
    path: str, folders: Mapping[str, str], seed: int, seconds: float, say: Callable[[str], None]
) -> int:
    """How many rows were compared.

    Raises:
        AssertionError: a row is wrong.
        TimeoutError: something hangs.
    """
    dice, compared, rounds = random.Random(seed), 0, 0
    oracle = Oracle(path, folders, TOKENS)  # before the block, in which transformers cannot load
    with (
        without_pinned_memory(),
        AsyncSGLTransformer.from_name(path, OPTIONS, cache_size=0) as lm,
    ):
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            results = asyncio.run(one_round(dice, lm, folders))
            lm.clear_kv_cache()
            chosen = dice.sample(results, min(COMPARED, len(results)))
            for context, kind, row in chosen:
                torch.testing.assert_close(row, oracle.row(context, kind), atol=ATOL, rtol=0)
            compared += len(chosen)
            rounds += 1
        assert lm.adapters == {}
        assert lm.stats.failed_calls == 0
    say(f"{rounds} rounds, {compared} rows compared")
    return compared


async def one_round(dice: random.Random, lm: AsyncLM, folders: Mapping[str, str]) -> list[Result]:
    prompts = [tokens(dice, dice.choice([1, 20, 63, 64, 65, 150])) for _ in range(3)]
    programs = [
        Program(lm, f"adapter-{number}", folders, prompts, random.Random(dice.random())).run()
        for number in range(PROGRAMS)
    ]
    async with asyncio.timeout(PATIENCE):
        return [each for results in await asyncio.gather(*programs) for each in results]


class Program:
    """One of several at work. Its name is its own; the folders are everybody's."""

    def __init__(
        self,
        lm: AsyncLM,
        name: str,
        folders: Mapping[str, str],
        prompts: list[Tokens],
        dice: random.Random,
    ) -> None:
        self._lm, self._name, self._folders = lm, name, folders
        self._prompts, self._dice = prompts, dice
        self._kind: str | None = None
        self.results: list[Result] = []

    async def run(self) -> list[Result]:
        ways = [self.bind, self.grow, self.draw, self.pin, self.leave, self.unbind]
        for way in self._dice.choices(ways, [2, 4, 2, 1, 2, 1], k=6):
            await way()
        await self.unbind()
        return self.results

    async def bind(self) -> None:
        """The name is bound, or bound again to another folder."""
        kind = self._dice.choice(list(self._folders))
        await asyncio.to_thread(self._lm.add_new_lora, self._folders[kind], self._name)
        self._kind = kind

    async def unbind(self) -> None:
        if self._kind is not None:
            self._kind = None
            await asyncio.to_thread(self._lm.remove_lora, self._name)

    async def grow(self) -> None:
        """A population that forks at every step."""
        contexts = [self._dice.choice(self._prompts)] * self._dice.randrange(1, 7)
        for _ in range(self._dice.randrange(1, 8)):
            contexts = [
                (*self._dice.choice(contexts), *tokens(self._dice, self._dice.choice([1, 1, 7])))
                for _ in contexts
            ]
            rows = await asyncio.gather(*map(self._row, contexts))
            self.results += zip(contexts, [self._kind] * len(rows), rows, strict=True)

    async def draw(self) -> None:
        """A draw, then the row behind a part of it."""
        prompt, count = self._dice.choice(self._prompts), self._dice.randrange(1, 30)
        seed = self._dice.choice([None, self._dice.randrange(100)])
        drawn = await self._lm.sample(prompt, count, [], seed=seed, lora_name=self._lora)
        assert len(drawn) == count
        context = (*prompt, *drawn[: self._dice.randrange(count + 1)])
        self.results.append((context, self._kind, await self._row(context)))

    async def pin(self) -> None:
        prompt = self._dice.choice(self._prompts)[:PINNED]
        await asyncio.to_thread(self._lm.cache_kv, prompt, self._lora)

    async def leave(self) -> None:
        """Rows and draws are asked, and cancelled once the first is there."""
        prompt = self._dice.choice(self._prompts)
        asked: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(self._row(prompt)),
            asyncio.ensure_future(self._row((*prompt, *tokens(self._dice, 90)))),
            asyncio.ensure_future(self._lm.sample(prompt, 40, [], lora_name=self._lora)),
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for future in asked:
            future.cancel()
        await asyncio.gather(*asked, return_exceptions=True)

    @property
    def _lora(self) -> str | None:
        return None if self._kind is None else self._name

    async def _row(self, context: Tokens) -> torch.Tensor:
        return await self._lm.next_token_logprobs(context, self._lora)


def tokens(dice: random.Random, count: int) -> Tokens:
    return tuple(dice.choices(range(256), k=count))
