"""Replicas that die: nothing that was asked is lost, and no row is another."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from genlm.core import (
    AsyncLM,
    EngineDeadError,
    EngineError,
    MockAsyncLM,
    hookimpl,
    load_model_by_name,
)
from genlm.core.errors import PluginError

from .conftest import PATIENCE, Held, save_tokenizer

Fleet = Callable[..., AsyncLM]

#: A token whose request ends the replica's process, and one whose error is of a class that only the
#: replicas have.
POISON, FOREIGN = 66, 67


def poisoned() -> Callable[[Any], None]:
    """Ends the process that evaluates the poison; travels by value."""
    poison = POISON

    def kill(queries: Any) -> None:
        if any(poison in query.token_ids for query in queries):
            os.kill(os.getpid(), 9)

    return kill


def of_poison() -> Callable[[Any], bool]:
    """For the mock's ``fail_on`` and ``die_on``; travels by value."""
    poison, foreign = POISON, FOREIGN

    def fails(query: Any) -> bool:
        if foreign in query.token_ids:
            there = sys.modules["only_there"] = ModuleType("only_there")
            vars(there)["Error"] = EngineError
            exec("class Foreign(Error): pass", vars(there))
            raise there.Foreign("no")
        return poison in query.token_ids

    return fails


@pytest.fixture(scope="module")
def well(cluster: Any) -> Iterator[AsyncLM]:
    """A fleet for the tests in which no replica dies."""
    opts = {"continuous": True, "steps": 1, "fail_on": of_poison()}
    with load_model_by_name("mock", "ray", {"backend": "mock", "backend_opts": opts}) as lm:
        yield lm


def contexts(n: int, seed: int = 0, of: Sequence[int] = range(60)) -> list[list[int]]:
    source = random.Random(seed)
    return [[*source.choices(of, k=source.randint(1, 90)), i] for i in range(n)]


def kill(cluster: Any, actor: Any) -> None:
    """End a replica, and wait until it has ended."""
    cluster.kill(actor)
    with contextlib.suppress(cluster.exceptions.RayActorError):
        while True:
            cluster.get(actor.__ray_ready__.remote(), timeout=PATIENCE)


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


def test_what_lost_replicas_held_is_asked_elsewhere(
    fleet: Fleet, gate: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is killed, and one hangs, which Ray does not notice."""
    monkeypatch.setattr("genlm.ray.watch.PULSE", 0.8)
    lm = fleet(backend_opts={"on_batch": gate.on_batch})
    asked = contexts(64)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(lambda: asyncio.run(ask(lm, asked)))
        for pid, sent in zip(gate.wait_held(2), (signal.SIGKILL, signal.SIGSTOP), strict=True):
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
    (failed,) = asyncio.run(ask(lm, [[POISON]]))
    assert isinstance(failed, EngineError)
    assert "3 replicas died" in str(failed)
    asked = contexts(4)
    check(asyncio.run(ask(lm, asked)), asked)


def test_a_request_that_fails_in_the_engine_fails_alone_and_kills_nothing(well: AsyncLM) -> None:
    replicas = [actor._actor_id for actor in well.underlying_model]
    asked = contexts(8)
    rows = asyncio.run(ask(well, [*asked, [POISON]]))
    check(rows[:-1], asked)
    assert isinstance(rows[-1], EngineError)
    assert [actor._actor_id for actor in well.underlying_model] == replicas


def test_an_answer_that_cannot_be_unpickled_is_nobodys_death(well: AsyncLM) -> None:
    replicas = [actor._actor_id for actor in well.underlying_model]
    asked = contexts(8)
    rows = asyncio.run(ask(well, [*asked, [FOREIGN]]))
    check(rows[:-1], asked)
    assert isinstance(rows[-1], EngineError)
    assert re.search("cannot be read here .*'only_there'.*install in this program", str(rows[-1]))
    assert [actor._actor_id for actor in well.underlying_model] == replicas


def test_a_replica_that_starts_again_has_its_adapters_and_prompts(
    fleet: Fleet, gate: Held, cluster: Any
) -> None:
    lm = fleet(replicas=1)
    lm.add_new_lora("first-adapter", "a")
    lm.cache_kv([1, 2, 3], lora_name="a")
    replicas = lm.underlying_model
    lost = replicas[0]
    kill(cluster, lost)
    row = lm.next_token_logprobs_sync([1, 2, 3, 4], lora_name="a")
    check([row], [[1, 2, 3, 4]], lora="a")
    assert len(replicas) == 1
    assert replicas[0]._actor_id != lost._actor_id, "the handle of the replica that was lost"
    cluster.get(replicas[0].__ray_ready__.remote(), timeout=PATIENCE)


class OneFails:
    """A wrapper in each replica: adding fails in the second one that finds the flag; what is
    removed is written down."""

    def __init__(self, folder: Path) -> None:
        self.flag, self.removed = folder / "flag", folder / "removed"
        self.other = folder / "other"

    @hookimpl(wrapper=True)
    def genlm_add_lora(self, adapter: Any) -> Any:
        added = yield
        with contextlib.suppress(FileNotFoundError):
            self.flag.rename(self.other)
            return added
        with contextlib.suppress(FileNotFoundError):
            self.other.unlink()
            raise ValueError("this replica cannot read the adapter")
        return added

    @hookimpl(wrapper=True)
    def genlm_remove_lora(self, adapter: Any) -> Any:
        with self.removed.open("a") as file:
            print(os.getpid(), adapter.path, file=file)
        return (yield)


def test_adapters_are_on_all_replicas_or_on_none(fleet: Fleet, tmp_path: Path) -> None:
    one_fails = OneFails(tmp_path)
    lm = fleet(backend_opts={"wrappers": [one_fails]})
    one_fails.flag.touch()
    with pytest.raises(PluginError, match="this replica cannot read"):
        lm.add_new_lora("first-adapter", "a")
    assert lm.adapters == {}
    (removed,) = one_fails.removed.read_text().splitlines()
    assert removed.endswith("first-adapter"), "the other replica kept it"
    lm.add_new_lora("first-adapter", "a")
    asked = contexts(16)

    async def adapted() -> list[torch.Tensor]:
        rows = (lm.next_token_logprobs(ids, lora_name="a") for ids in asked)
        return await asyncio.gather(*rows)

    check(asyncio.run(adapted()), asked, lora="a")


def test_replicas_that_cannot_start_again_are_a_clear_error(
    fleet: Fleet, tmp_path: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.ray.watch.REST", 0.0)
    save_tokenizer(str(tmp_path))
    lm = fleet(str(tmp_path), replicas=1)
    shutil.rmtree(tmp_path)
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


def test_a_row_is_answered_while_a_long_draw_goes_on(well: AsyncLM) -> None:
    """Where all replicas are at work on one."""

    async def main() -> None:
        draws = [asyncio.ensure_future(well.sample([1, 2], 10_000_000, [])) for _ in range(2)]
        row = await asyncio.wait_for(well.next_token_logprobs([5]), PATIENCE)
        assert not any(draw.done() for draw in draws)
        check([row], [[5]])
        for draw in draws:
            draw.cancel()

    asyncio.run(main())


def test_draws_and_scores_are_those_of_the_inner_backend(well: AsyncLM) -> None:
    async def both(model: AsyncLM) -> tuple[list[list[int]], torch.Tensor]:
        draws = await model.batch_sample([[1, 2], [3, 4], [1, 2]], 12, [0], seed=7)
        return draws, await model.sequence_logprobs([1, 2, 3], [4, 5, 6])

    with MockAsyncLM() as mock:
        expected, scores = asyncio.run(both(mock))
    drawn, scored = asyncio.run(both(well))
    assert drawn == expected
    torch.testing.assert_close(scored, scores)


class Steps:
    """A wrapper that counts the engine's steps."""

    count = 0

    @hookimpl(wrapper=True)
    def genlm_step(self, queries: Any, samples: Any, scores: Any, dropped: Any) -> Any:
        self.count += 1
        return (yield)


def test_a_fleet_at_work_does_not_poll(
    fleet: Fleet, gate: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the replicas work, the engine thread waits: one step sends, another takes the rows."""
    monkeypatch.setattr("genlm.ray.watch.PULSE", 1e6)  # a ping is a step too
    steps = Steps()
    lm = fleet(replicas=1, backend_opts={"on_batch": gate.on_batch}, wrappers=[steps])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asking = pool.submit(lambda: asyncio.run(ask(lm, contexts(32))))
        gate.wait_held(1)
        for _ in range(200):  # a tenth of a second at least, in which 2 ms would be 50 steps
            gate.wait_held(1)
        gate.open()
        asking.result(PATIENCE)
    assert steps.count <= 20


def test_a_campaign_of_kills_loses_nothing(fleet: Fleet, cluster: Any) -> None:
    """Replicas without a name are killed while rows are asked in waves; those that have one are in
    test_fuzz.py."""
    lm = fleet(replicas=3, backend_opts={"continuous": True, "steps": 2})

    async def waves() -> None:
        for seed, victims in enumerate(([0], [2, 1], [0, 2])):
            asked = contexts(40, seed)
            asking = asyncio.ensure_future(ask(lm, asked))
            for victim in victims:
                await asyncio.sleep(0)
                cluster.kill(lm.underlying_model[victim])
            check(await asking, asked)

    asyncio.run(waves())
