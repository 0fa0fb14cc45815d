"""Replicas that die: nothing that was asked is lost, and no row is another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from genlm.core import AsyncLM, EngineDeadError, EngineError, MockAsyncLM

from .conftest import PATIENCE, Held

Fleet = Callable[..., AsyncLM]

#: A token whose request ends the replica's process.
POISON = 66


def poisoned() -> Callable[[Any], None]:
    """Ends the process that evaluates the poison; travels by value."""
    poison = POISON

    def kill(queries: Any) -> None:
        if any(poison in query.token_ids for query in queries):
            os.kill(os.getpid(), 9)

    return kill


def of_poison() -> Callable[[Any], bool]:
    """For the mock's ``fail_on`` and ``die_on``; travels by value."""
    poison = POISON
    return lambda query: poison in query.token_ids


def contexts(n: int, seed: int = 0, of: Sequence[int] = range(60)) -> list[list[int]]:
    source = random.Random(seed)
    return [[*source.choices(of, k=source.randint(1, 90)), i] for i in range(n)]


async def ask(lm: AsyncLM, asked: Sequence[Sequence[int]]) -> list[Any]:
    rows = (lm.next_token_logprobs(ids) for ids in asked)
    return await asyncio.wait_for(asyncio.gather(*rows, return_exceptions=True), PATIENCE)


def check(rows: Sequence[Any], asked: Sequence[Sequence[int]], lora: str | None = None) -> None:
    """Every row is the mock's."""
    with MockAsyncLM() as mock:
        if lora is not None:
            mock.add_new_lora("first-adapter", lora)
        for row, ids in zip(rows, asked, strict=True):
            expected = mock.next_token_logprobs_sync(ids, lora_name=lora)
            torch.testing.assert_close(row, expected, atol=0, rtol=0)


@pytest.mark.parametrize("signals", [[signal.SIGKILL], [signal.SIGKILL] * 2, [signal.SIGSTOP]])
def test_what_a_lost_replica_held_is_asked_elsewhere(
    fleet: Fleet, gate: Held, monkeypatch: pytest.MonkeyPatch, signals: list[signal.Signals]
) -> None:
    """One is killed, or all, or one hangs, which Ray does not notice."""
    monkeypatch.setattr("genlm.ray.fleet.PULSE", 0.8)
    lm = fleet(backend_opts={"on_batch": gate.on_batch})
    asked = contexts(64)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(lambda: asyncio.run(ask(lm, asked)))
        for pid, sent in zip(gate.wait_held(2), signals, strict=False):
            os.kill(pid, sent)
        gate.open()
        check(asking.result(PATIENCE), asked)


def test_a_request_that_kills_replicas_fails_alone(fleet: Fleet) -> None:
    lm = fleet(backend_opts={"on_batch": poisoned()})
    asked = contexts(16)
    rows = asyncio.run(ask(lm, [*asked, [POISON]]))
    check(rows[:-1], asked)
    assert isinstance(rows[-1], EngineError)
    assert "3 replicas died" in str(rows[-1])
    check(asyncio.run(ask(lm, [[1, 2, 3]])), [[1, 2, 3]])


def test_an_engine_that_says_it_is_dead_is_replaced(fleet: Fleet) -> None:
    lm = fleet(replicas=1, backend_opts={"die_on": of_poison()})
    asked = contexts(4)
    rows = asyncio.run(ask(lm, [[POISON], *asked]))
    assert isinstance(rows[0], EngineError)
    check(rows[1:], asked)


def test_a_request_that_fails_in_the_engine_fails_alone_and_kills_nothing(fleet: Fleet) -> None:
    lm = fleet(backend_opts={"fail_on": of_poison()})
    replicas = [actor._actor_id for actor in lm.underlying_model]
    asked = contexts(8)
    rows = asyncio.run(ask(lm, [*asked, [POISON]]))
    check(rows[:-1], asked)
    assert isinstance(rows[-1], EngineError)
    assert [actor._actor_id for actor in lm.underlying_model] == replicas


def test_a_replica_that_starts_again_has_its_adapters_and_prompts(
    fleet: Fleet, gate: Held, cluster: Any
) -> None:
    lm = fleet(replicas=1)
    lm.add_new_lora("first-adapter", "a")
    lm.cache_kv([1, 2, 3], lora_name="a")
    replicas = lm.underlying_model
    lost = replicas[0]
    cluster.kill(lost)
    row = lm.next_token_logprobs_sync([1, 2, 3, 4], lora_name="a")
    check([row], [[1, 2, 3, 4]], lora="a")
    assert len(replicas) == 1
    assert replicas[0]._actor_id != lost._actor_id, "the handle of the replica that was lost"
    cluster.get(replicas[0].ping.remote(), timeout=PATIENCE)


def test_adapters_are_on_all_replicas_or_on_none(
    fleet: Fleet, tiny: str, lora_folders: dict[str, Path], tmp_path: Path
) -> None:
    lm = fleet(tiny, backend="hf")
    before = lm.next_token_logprobs_uncached([1, 2, 3])
    with pytest.raises(ValueError, match="nowhere"):
        lm.add_new_lora(tmp_path / "nowhere", "broken")
    lm.add_new_lora(lora_folders["a"], "a")
    adapted = asyncio.run(ask_with(lm, "a", contexts(8)))
    assert len(adapted) == 8
    lm.remove_lora("a")
    torch.testing.assert_close(lm.next_token_logprobs_uncached([1, 2, 3]), before)


async def ask_with(lm: AsyncLM, lora: str, asked: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    return await asyncio.gather(*(lm.next_token_logprobs(ids, lora_name=lora) for ids in asked))


def test_replicas_that_cannot_start_again_are_a_clear_error(
    fleet: Fleet, tiny: str, tmp_path: Path, cluster: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny, folder)
    lm = fleet(str(folder), backend="hf", replicas=1)
    shutil.rmtree(folder)
    (actor,) = lm.underlying_model
    cluster.kill(actor)
    with pytest.raises(EngineDeadError, match="load the model again"):
        lm.next_token_logprobs_sync([1, 2, 3])
    with pytest.raises(EngineDeadError):
        lm.next_token_logprobs_sync([1, 2])


def test_a_cancelled_draw_is_cancelled_in_the_replica(fleet: Fleet, gate: Held) -> None:
    lm = fleet(replicas=1, backend_opts={"on_batch": gate.on_batch, "continuous": True})

    async def main() -> None:
        draw = asyncio.ensure_future(lm.sample([1, 2, 3], 10_000_000, []))
        await asyncio.to_thread(gate.wait_held, 1)
        draw.cancel()
        gate.open()
        row = await asyncio.wait_for(lm.next_token_logprobs([5]), PATIENCE)
        check([row], [[5]])

    asyncio.run(main())
    lm.close()  # a draw that went on would hold it for days


def test_a_row_is_answered_while_a_long_draw_goes_on(fleet: Fleet) -> None:
    lm = fleet(replicas=1, backend_opts={"continuous": True, "steps": 1})

    async def main() -> None:
        draw = asyncio.ensure_future(lm.sample([1, 2, 3], 10_000_000, []))
        row = await asyncio.wait_for(lm.next_token_logprobs([5]), PATIENCE)
        assert not draw.done()
        check([row], [[5]])
        draw.cancel()

    asyncio.run(main())


def test_draws_and_scores_are_those_of_the_inner_backend(fleet: Fleet) -> None:
    lm = fleet()

    async def both(model: AsyncLM) -> tuple[list[list[int]], torch.Tensor]:
        draws = await model.batch_sample([[1, 2], [3, 4], [1, 2]], 12, [0], seed=7)
        return draws, await model.sequence_logprobs([1, 2, 3], [4, 5, 6])

    with MockAsyncLM() as mock:
        expected, scores = asyncio.run(both(mock))
    drawn, scored = asyncio.run(both(lm))
    assert drawn == expected
    torch.testing.assert_close(scored, scores)


def test_an_idle_fleet_does_not_poll(fleet: Fleet, gate: Held) -> None:
    """While the replicas work, the engine thread waits: one step sends, one takes the rows."""
    lm = fleet(backend_opts={"on_batch": gate.on_batch})
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(lambda: asyncio.run(ask(lm, contexts(32))))
        gate.wait_held(2)
        gate.open()
        asking.result(PATIENCE)
    assert lm.stats.batches <= 4


@pytest.mark.parametrize("seed", range(3))
def test_a_campaign_of_kills_loses_nothing(fleet: Fleet, cluster: Any, seed: int) -> None:
    """Replicas are killed at random while rows are asked in waves."""
    source = random.Random(seed)
    lm = fleet(replicas=3, backend_opts={"continuous": True, "steps": 2})

    async def waves() -> None:
        for wave in range(4):
            asked = contexts(40, seed=100 * seed + wave)
            asking = asyncio.ensure_future(ask(lm, asked))
            for _ in range(source.randint(1, 2)):
                await asyncio.sleep(0)
                cluster.kill(source.choice(lm.underlying_model))
            check(await asking, asked)

    asyncio.run(waves())
