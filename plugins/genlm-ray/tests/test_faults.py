"""Replicas that die, or reject requests: the right request is blamed, and nothing else is lost."""

from __future__ import annotations

import asyncio
import os
import random
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from genlm.core import AsyncLM, EngineError, MockAsyncLM, load_model_by_name
from genlm.core.errors import PluginError
from genlm.ray.replica import Replica

from .conftest import PATIENCE

#: Three tokens: the request of one ends the replica's process, that of another fails in the engine,
#: and the third fails with an error whose class only the replicas have.
KILLS, FAILS, FOREIGN = 65, 66, 67


def failing() -> Callable[[Any], bool]:
    """For the mock's ``fail_on``; travels by value."""
    kills, fails, foreign = KILLS, FAILS, FOREIGN

    def fails_on(query: Any) -> bool:
        if kills in query.token_ids:
            os.kill(os.getpid(), 9)
        if foreign in query.token_ids:
            there = sys.modules["only_there"] = ModuleType("only_there")
            vars(there)["Error"] = EngineError
            exec("class Foreign(Error): pass", vars(there))
            raise there.Foreign("no")
        return fails in query.token_ids

    return fails_on


class TwoParts(PluginError):
    """An error that does not unpickle, as many do not."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def bad_adapters() -> Callable[[Any], None]:
    """A function for the mock's ``on_adapter``: one adapter cannot be read, and another ends the
    process."""

    def on_adapter(adapter: Any) -> None:
        if adapter.path == "broken":
            raise TwoParts("the folder is broken", "quite")
        if adapter.path == "kills":
            os.kill(os.getpid(), 9)

    return on_adapter


@pytest.fixture(scope="module")
def lm(cluster: Any) -> Iterator[AsyncLM]:
    opts = {"continuous": True, "steps": 1, "fail_on": failing()}
    opts["on_adapter"] = bad_adapters()
    with load_model_by_name("mock", "ray", {"backend": "mock", "backend_opts": opts}) as lm:
        yield lm


def replicas(lm: AsyncLM) -> list[Any]:
    return [actor._actor_id for actor in lm.underlying_model]


def contexts(n: int) -> list[list[int]]:
    source = random.Random(n)
    return [[*source.choices(range(60), k=source.randint(1, 90)), i] for i in range(n)]


async def ask(lm: AsyncLM, asked: Sequence[Sequence[int]]) -> list[Any]:
    rows = (lm.next_token_logprobs(ids) for ids in asked)
    return await asyncio.wait_for(asyncio.gather(*rows, return_exceptions=True), PATIENCE)


def check(rows: Sequence[Any], asked: Sequence[Sequence[int]]) -> None:
    """Every row is the mock's."""
    with MockAsyncLM() as mock:
        for row, ids in zip(rows, asked, strict=True):
            expected = mock.next_token_logprobs_sync(ids)
            torch.testing.assert_close(row, expected, atol=0, rtol=0)


def works(lm: AsyncLM) -> None:
    lm.clear_cache()
    check(asyncio.run(ask(lm, contexts(16))), contexts(16))


def test_a_request_that_kills_replicas_fails_alone(lm: AsyncLM) -> None:
    """Their successors are of the same class: Ray keeps each that it was ever given."""
    asked, kinds = contexts(17), Replica.__subclasses__()
    *rows, killer = asyncio.run(ask(lm, [*asked, [KILLS]]))
    check(rows, asked)
    assert isinstance(killer, EngineError)
    assert "3 replicas died" in str(killer)
    works(lm)
    assert Replica.__subclasses__() == kinds


def test_request_that_fails_in_the_engine_fails_alone(lm: AsyncLM) -> None:
    """Nor does an answer that cannot be unpickled."""
    before = replicas(lm)
    asked = contexts(18)
    *rows, failed, unreadable = asyncio.run(ask(lm, [*asked, [FAILS], [FOREIGN]]))
    check(rows, asked)
    assert isinstance(failed, EngineError)
    assert isinstance(unreadable, EngineError)
    assert re.search("cannot be read here .*'only_there'.*install in this program", str(unreadable))
    assert replicas(lm) == before


def test_an_adapter_that_kills_replicas_is_rejected(lm: AsyncLM) -> None:
    """It is never given to a further replica."""
    before = replicas(lm)
    with pytest.raises(EngineError, match="3 replicas died, one after the other"):
        lm.add_new_lora("kills", "a")
    works(lm)
    assert any(now == then for now, then in zip(replicas(lm), before, strict=True))


def test_error_that_cannot_be_unpickled_becomes_an_engine_error(lm: AsyncLM) -> None:
    before = replicas(lm)
    with pytest.raises(EngineError, match="TwoParts in a replica: the folder is broken"):
        lm.add_new_lora("broken", "a")
    assert lm.adapters == {}
    works(lm)
    assert replicas(lm) == before


def test_a_cancelled_draw_is_cancelled_in_the_replica(lm: AsyncLM, cluster: Any) -> None:
    def count(what: str) -> int:
        """The counters of the replicas' models; a loading one has counted nothing."""

        def counted(replica: Any) -> int:
            return getattr(replica.lm.stats, what) if hasattr(replica, "lm") else 0

        calls = [actor.__ray_call__.remote(counted) for actor in lm.underlying_model]
        return sum(cluster.get(calls, timeout=PATIENCE))

    before = {what: count(what) for what in ("requests", "cancelled")}

    async def main() -> None:
        draw = asyncio.ensure_future(lm.sample([1, 2, 3], 10_000_000, []))
        while await asyncio.to_thread(count, "requests") == before["requests"]:
            pass
        draw.cancel()

    asyncio.run(main())
    deadline = time.monotonic() + PATIENCE
    while count("cancelled") == before["cancelled"]:
        assert time.monotonic() < deadline, "the draw goes on"


def test_a_replica_whose_engine_dies_is_replaced_with_its_adapters(
    fleet: Callable[..., AsyncLM], tmp_path: Path
) -> None:
    """Its requests are answered. The replica ends its own process, since other programs may use
    it."""
    flag = str(tmp_path / "flag")

    def dies_once(query: Any) -> bool:
        there = os.path.exists(flag)
        if there:
            os.unlink(flag)
        return there

    lm = fleet(replicas=1, name="mortal", backend_opts={"die_on": dies_once})
    lm.add_new_lora("first-adapter", "a")
    (lost,) = replicas(lm)
    Path(flag).touch()
    row = lm.next_token_logprobs_sync([1, 2, 3, 4], lora_name="a")
    with MockAsyncLM() as mock:
        mock.add_new_lora("first-adapter", "a")
        assert row.equal(mock.next_token_logprobs_sync([1, 2, 3, 4], lora_name="a"))
    assert replicas(lm) != [lost], "the handle of the replica that was lost"


def test_ten_thousand_scores_in_one_gather_are_right(
    fleet: Callable[..., AsyncLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The watch is not kept waiting, and no call is long."""
    monkeypatch.setattr("genlm.ray.watch.PULSE_SECONDS", 1.0)
    lm = fleet(replicas=1, backend_opts={"delay": 0.001})
    before = replicas(lm)

    async def score() -> list[torch.Tensor]:
        scores = (lm.sequence_logprobs([i // 200, i % 200], [1]) for i in range(10_400))
        return await asyncio.wait_for(asyncio.gather(*scores), PATIENCE)

    scores = asyncio.run(score())
    assert replicas(lm) == before
    for i in range(0, 10_400, 500):
        row = lm.next_token_logprobs_sync([i // 200, i % 200])
        torch.testing.assert_close(scores[i], row[1:2])
