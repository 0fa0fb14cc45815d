"""Kills in every state of a fleet on real Ray, while two programs ask and change its state.

Every request gets the mock's answer, bit for bit, and no change of state fails. ``GENLM_FUZZ_SEED``
repeats a run; ``nox -s "costly(ray)"`` kills for an hour.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attrs import define, frozen

from genlm.conformance import Program
from genlm.conformance.driver import LoopThread
from genlm.core import AsyncLM, Query, hookimpl
from genlm.core.mock import hashed_row
from tools.users import User

from .conftest import PATIENCE

#: Seconds for which further rounds are started; there is at least one.
SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "6"))

ADAPTERS = {"a": "first-adapter", "b": "second-adapter"}


@frozen
class Slow:
    """A wrapper in each replica, so that changes of state can be met under way."""

    @hookimpl
    def genlm_call_begins(self, hook: str) -> None:
        if hook in ("genlm_add_lora", "genlm_cache_prefix"):
            time.sleep(0.05)


@define(eq=False, kw_only=True)
class OnAFleet(Program):
    """A user of a fleet, whose state changes often, and whose rows are those of the mock."""

    vocab_size: int

    def ways(self) -> dict[Callable[[], None], int]:
        often = {self.step: 8, self.draw: 2, self.score: 2, self.drained: 2}
        return {**often, self.adapt: 3, self.pin: 2, self.clear: 1}

    def expected(self, query: Query) -> torch.Tensor:
        return hashed_row(query.token_ids, query.adapter, self.vocab_size)


@define
class Campaign:
    """Rounds of random programs, in each of which replicas are killed."""

    cluster: Any
    parent: int  # the process that starts the replicas' processes
    source: random.Random
    replicas: Any
    programs: list[Program]

    def round(self) -> None:
        failed: list[BaseException] = []

        def act(program: Program) -> None:
            try:
                program.run(10)
            except BaseException as error:
                failed.append(error)

        acting = [threading.Thread(target=act, args=(each,)) for each in self.programs]
        for one in acting:
            one.start()
        self.kill()
        for one in acting:
            one.join(PATIENCE)
            assert not one.is_alive(), "a program hangs"
        for error in failed:
            raise error
        self.await_all()

    def kill(self) -> None:
        """Kill one replica or all at once, perhaps again as soon as one has restarted."""
        for _ in range(self.source.randint(1, 2)):
            time.sleep(self.source.choice([0.0, 0.01, 0.05, 0.2, 2.0]))
            there = self.processes()
            number = self.source.choice([1, 1, len(there)])
            for pid in self.source.sample(there, min(number, len(there))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def processes(self) -> list[int]:
        """The processes of all replicas, including loading ones."""
        found = []
        for pid in Path(f"/proc/{self.parent}/task/{self.parent}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"ray::Replica" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return sorted(found)

    def await_all(self) -> None:
        """Wait until every replica has loaded its model, because a replica that is killed whenever
        it loads is given up."""
        for index in range(len(self.replicas)):
            deadline = time.monotonic() + PATIENCE
            while True:
                loaded = self.replicas[index].__ray_call__
                try:
                    self.cluster.get(loaded.remote(lambda replica: len(replica.lm.byte_vocab)))
                    break
                except self.cluster.exceptions.RayError:
                    assert time.monotonic() < deadline, f"replica {index} did not come back"


def test_kills_in_every_state(cluster: Any, fleet: Callable[..., AsyncLM], fuzz_seed: int) -> None:
    options: dict[str, Any] = {"continuous": True, "delay": 0.005, "wrappers": [Slow()]}
    options = {"replicas": 3, "name": f"fuzz{fuzz_seed}", "backend_opts": options}
    lms = [fleet(**options), fleet(**options)]
    programs = [
        OnAFleet(
            engine=User(lm, LoopThread(), str(number), PATIENCE),
            source=random.Random(f"{fuzz_seed}-{number}"),
            longest=100,
            tokens=range(200),
            first=range(40),
            adapters=ADAPTERS,
            atol=0.0,
            seeds=True,
            vocab_size=len(lm.byte_vocab),
        )
        for number, lm in enumerate(lms)
    ]
    parent = cluster.get(cluster.remote(lambda: os.getppid()).remote(), timeout=PATIENCE)
    for program in programs:
        program.adapt()
    source, replicas = random.Random(fuzz_seed), lms[0].underlying_model
    campaign = Campaign(cluster, parent, source, replicas, programs)
    campaign.round()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        campaign.round()
    for program in programs:
        program.engine.loop.close()
