"""State that breaks replicas, and programs that share them: who is to blame, and who is not."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import frozen

from genlm.core import AsyncLM, EngineError, hookimpl, load_model_by_name
from genlm.core.errors import BackendUnavailableError, PluginError
from genlm.ray import end_fleet

from .conftest import PATIENCE
from .test_faults import POISON, check, contexts, kill
from .test_faults import ask as ask_all

Fleet = Callable[..., AsyncLM]


class TwoParts(PluginError):
    """An error that does not unpickle, as many do not."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


@frozen
class Poisoned:
    """A wrapper in each replica: adapters named so cannot be read, prompts with the poison kill."""

    @hookimpl(wrapper=True)
    def genlm_add_lora(self, adapter: Any) -> Any:
        if adapter.path == "broken":
            raise TwoParts("the folder is broken", "quite")
        if adapter.path == "kills":
            os.kill(os.getpid(), 9)
        if adapter.path.startswith("/") and not os.path.exists(adapter.path):
            raise FileNotFoundError(f"no folder {adapter.path}")
        return (yield)

    @hookimpl(wrapper=True)
    def genlm_cache_prefix(self, query: Any) -> Any:
        if POISON in query.token_ids:
            os.kill(os.getpid(), 9)
        return (yield)


@pytest.fixture(scope="module")
def poisoned(cluster: Any) -> Iterator[AsyncLM]:
    opts = {"backend": "mock", "backend_opts": {"wrappers": [Poisoned()]}}
    with load_model_by_name("mock", "ray", opts) as lm:
        yield lm


def works(lm: AsyncLM) -> None:
    asked = contexts(16, seed=time.monotonic_ns())
    check(asyncio.run(ask_all(lm, asked)), asked)


def ask_for_ever(lm: AsyncLM, lora: str) -> None:
    while True:
        lm.clear_cache()
        lm.next_token_logprobs_sync([1, 2], lora_name=lora)


def test_an_error_that_does_not_unpickle_is_an_error(poisoned: AsyncLM) -> None:
    replicas = [actor._actor_id for actor in poisoned.underlying_model]
    with pytest.raises(EngineError, match="TwoParts in a replica: the folder is broken"):
        poisoned.add_new_lora("broken", "a")
    assert poisoned.adapters == {}
    works(poisoned)
    assert [actor._actor_id for actor in poisoned.underlying_model] == replicas


@pytest.mark.parametrize(
    "change", [lambda lm: lm.add_new_lora("kills", "a"), lambda lm: lm.cache_kv([1, POISON])]
)
def test_state_that_kills_replicas_is_refused(
    poisoned: AsyncLM, change: Callable[[AsyncLM], None]
) -> None:
    """And never given to another one."""
    before = [*poisoned.underlying_model]
    with pytest.raises(EngineError, match="3 replicas died, one after the other"):
        change(poisoned)
    works(poisoned)
    assert any(now is then for now, then in zip(poisoned.underlying_model, before, strict=True))


def test_an_adapter_that_cannot_be_loaded_again_is_lost_and_no_replica(
    fleet: Fleet, cluster: Any, tmp_path: Path
) -> None:
    options = {"name": "neighbours", "backend_opts": {"wrappers": [Poisoned()]}}
    lm, neighbour = fleet(**options), fleet(**options)
    folder = tmp_path / "adapter"
    folder.mkdir()
    lm.add_new_lora(folder, "a")
    lm.next_token_logprobs_sync([1, 2], lora_name="a")
    folder.rmdir()
    kill(cluster, lm.underlying_model[0])
    works(neighbour)
    with pytest.raises(EngineError, match=r"'a' could not be loaded again.*no folder"):
        ask_for_ever(lm, "a")
    replicas = [actor._actor_id for actor in lm.underlying_model]
    works(lm)
    works(neighbour)
    assert [actor._actor_id for actor in neighbour.underlying_model] == replicas
    (tmp_path / "adapter").mkdir()
    lm.remove_lora("a")
    lm.add_new_lora(folder, "a")
    lm.next_token_logprobs_sync([1, 2], lora_name="a")
    end_fleet("neighbours")


def test_replicas_that_die_idle_are_not_blamed_on_the_next_row(fleet: Fleet, cluster: Any) -> None:
    lm = fleet(replicas=3)
    for actor in lm.underlying_model:
        kill(cluster, actor)
    row = lm.next_token_logprobs_sync([1, 2, 3])
    check([row], [[1, 2, 3]])


def test_ten_thousand_scores_in_one_gather(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """The watch is not kept waiting, and no call is long."""
    monkeypatch.setattr("genlm.ray.watch.PULSE", 0.3)
    lm = fleet(replicas=1, backend_opts={"delay": 0.001})
    replica = lm.underlying_model[0]

    async def score() -> list[torch.Tensor]:
        scores = (lm.sequence_logprobs([i // 200, i % 200], [1]) for i in range(10_400))
        return await asyncio.wait_for(asyncio.gather(*scores), PATIENCE)

    scores = asyncio.run(score())
    assert lm.underlying_model[0] is replica
    for i in range(0, 10_400, 500):
        row = lm.next_token_logprobs_sync([i // 200, i % 200])
        torch.testing.assert_close(scores[i], row[1:2])


def test_a_program_that_cannot_join_ends_no_replica(
    fleet: Fleet, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that hangs, and that others use."""
    monkeypatch.setattr("genlm.ray.engine.GRACE", 0.5)
    lm = fleet(replicas=1, name="hanging")
    (actor,) = lm.underlying_model
    pid = cluster.get(actor.__ray_call__.remote(lambda replica: os.getpid()))
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(BackendUnavailableError, match="0 of 1 replicas were ready"):
        fleet(replicas=1, name="hanging", start_timeout=0.5)
    os.kill(pid, signal.SIGCONT)
    works(lm)
    assert lm.underlying_model[0] is actor
    end_fleet("hanging")


#: Binds an adapter, begins a long draw, and stays.
NEIGHBOUR = """
import asyncio, sys, ray
import genlm.ray.watch
genlm.ray.watch.PULSE = 0.5
from genlm.core import load_model_by_name
ray.init(sys.argv[1], logging_level="ERROR", log_to_driver=False)
opts = {"continuous": True, "steps": 1}
options = {"backend": "mock", "replicas": 1, "name": "full", "backend_opts": opts}
lm = load_model_by_name("mock", "ray", options)
lm.add_new_lora("first-adapter", "mine")

async def main():
    draw = asyncio.ensure_future(lm.sample([1, 2, 3], 10_000_000, [], lora_name="mine"))
    await lm.next_token_logprobs([5], lora_name="mine")
    print("here", flush=True)
    await draw

asyncio.run(main())
"""


def test_what_a_killed_program_held_ends_with_it(fleet: Fleet, cluster: Any, address: str) -> None:
    """Its adapter, and its draw: until that ends, an engine takes no new adapter."""
    opts = {"continuous": True, "steps": 1}
    lm = fleet(replicas=1, name="full", backend_opts=opts)
    neighbour = subprocess.Popen(
        [sys.executable, "-c", NEIGHBOUR, address], stdout=subprocess.PIPE, text=True
    )
    assert neighbour.stdout is not None
    assert neighbour.stdout.readline() == "here\n"
    (actor,) = lm.underlying_model
    (held,) = adapters_of(cluster, actor)
    neighbour.send_signal(signal.SIGKILL)
    neighbour.wait()
    lm.add_new_lora("second-adapter", "mine")  # behind the draw
    while held in adapters_of(cluster, actor):
        pass
    lm.remove_lora("mine")
    assert lm.underlying_model[0] is actor
    lm.close()
    end_fleet("full")


def adapters_of(cluster: Any, actor: Any) -> list[str]:
    """The adapters that the replica's model has."""

    def names(replica: Any) -> list[str]:
        return [*replica.lm.adapters]

    found: list[str] = cluster.get(actor.__ray_call__.remote(names), timeout=PATIENCE)
    return found
