"""Kills in every state of a fleet on real Ray, while two programs ask and change its state.

What is asked is answered as the mock answers it, bit for bit, and no change of state is refused.
``GENLM_FUZZ_SEED`` repeats a run; ``nox -s "costly(ray)"`` kills for an hour.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import define, field, frozen

from genlm.core import AsyncLM, MockAsyncLM, hookimpl

from .conftest import PATIENCE

#: How long to go on with rounds; there is one at least.
SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "6"))

PATHS = ("first-adapter", "second-adapter")


@frozen
class Slow:
    """A wrapper in each replica, so that changes of state can be met under way."""

    @hookimpl(wrapper=True)
    def genlm_add_lora(self, adapter: Any) -> Any:
        time.sleep(0.05)
        return (yield)

    @hookimpl(wrapper=True)
    def genlm_cache_prefix(self, query: Any) -> Any:
        time.sleep(0.05)
        return (yield)


@define
class Campaign:
    """Rounds of requests or changes, in each of which replicas are killed."""

    cluster: Any
    parent: int  # the process that starts those of the replicas
    source: random.Random
    programs: list[AsyncLM]
    mock: MockAsyncLM
    bound: dict[int, str | None] = field(factory=dict)  # by program, the path of its adapter

    async def round(self) -> None:
        kills = asyncio.ensure_future(self.kill())
        acting = (self.act(number, lm) for number, lm in enumerate(self.programs))
        await asyncio.wait_for(asyncio.gather(*acting), PATIENCE)
        await kills
        await asyncio.to_thread(self.await_all)

    async def kill(self) -> None:
        """One replica, or all at once; perhaps again, as soon as there is one."""
        for _ in range(self.source.randint(1, 2)):
            await asyncio.sleep(self.source.choice([0.0, 0.01, 0.05, 0.2, 2.0]))
            there = self.processes()
            number = self.source.choice([1, 1, len(there)])
            for pid in self.source.sample(there, min(number, len(there))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """Those of all replicas, also of those that load."""
        found = []
        for pid in Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"ray::Replica" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return sorted(found)

    def await_all(self) -> None:
        """Until every replica has loaded its model: one that is killed whenever it loads is given
        up."""
        for index in range(len(self.programs[0].underlying_model)):
            deadline = time.monotonic() + PATIENCE
            while True:
                loaded = self.programs[0].underlying_model[index].__ray_call__
                try:
                    self.cluster.get(loaded.remote(lambda replica: len(replica.lm.byte_vocab)))
                    break
                except self.cluster.exceptions.RayError:
                    assert time.monotonic() < deadline, f"replica {index} did not come back"

    async def act(self, number: int, lm: AsyncLM) -> None:
        acts: list[Callable[[int, AsyncLM], Any]] = [self.ask, self.ask, self.bind, self.pin]
        await self.source.choice(acts)(number, lm)
        await self.ask(number, lm)

    async def bind(self, number: int, lm: AsyncLM) -> None:
        path = self.source.choice(PATHS)
        await asyncio.to_thread(lm.add_new_lora, path, "mine")
        self.bound[number] = path

    async def pin(self, number: int, lm: AsyncLM) -> None:
        if self.source.random() < 0.2:
            await asyncio.to_thread(lm.clear_kv_cache)
        await asyncio.to_thread(lm.cache_kv, [self.source.randrange(200)])

    async def ask(self, number: int, lm: AsyncLM) -> None:
        """Rows, draws and scores."""
        path = self.bound.get(number)
        asked = []
        for _ in range(self.source.randint(1, 80)):
            ids = self.source.choices(range(200), k=self.source.randint(1, 60))
            lora = self.source.choice([None, path])
            asked.append((self.source.choice("rrrds"), ids, lora))
        given = [(kind, ids, lora and "mine") for kind, ids, lora in asked]
        answers = await asyncio.gather(*(answer(lm, *each) for each in given))
        for each, got in zip(asked, answers, strict=True):
            expected = await answer(self.mock, *each)
            assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected)), each


async def answer(lm: AsyncLM, kind: str, ids: list[int], lora: str | None) -> Any:
    if kind == "d":
        return await lm.sample(ids, 5, [], seed=7, lora_name=lora)
    if kind == "s":
        return await lm.sequence_logprobs(ids, [1, 2, 3], lora_name=lora)
    return await lm.next_token_logprobs(ids, lora_name=lora)


def test_kills_in_every_state(cluster: Any, fleet: Callable[..., AsyncLM], fuzz_seed: int) -> None:
    options: dict[str, Any] = {"continuous": True, "delay": 0.005, "wrappers": [Slow()]}
    options = {"replicas": 3, "name": f"fuzz{fuzz_seed}", "backend_opts": options}
    programs = [fleet(**options), fleet(**options)]
    parent = cluster.get(cluster.remote(lambda: os.getppid()).remote(), timeout=PATIENCE)
    with MockAsyncLM() as mock:
        for path in PATHS:
            mock.add_new_lora(path, path)
        campaign = Campaign(cluster, parent, random.Random(fuzz_seed), programs, mock)
        asyncio.run(campaign.round())
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            asyncio.run(campaign.round())
