"""How long the fleet waits: over a Ray whose replicas answer when the test says so."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from genlm.core import EngineDeadError, Query
from genlm.core.mock import ByteTokenizer
from genlm.ray.fleet import PULSE, SILENT, Fleet
from genlm.ray.options import RayOptions
from genlm.ray.wire import Description


class Clock:
    """Time as the test has it."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class RayError(Exception):
    """A replica has died, says Ray."""


class Actor:
    """A replica: the calls that were made of it, none of them answered."""

    def __init__(self) -> None:
        self.asked: dict[str, list[Future[Any]]] = {}

    def __getattr__(self, method: str) -> Any:
        def remote(*args: Any) -> Any:
            answer: Future[Any] = Future()
            self.asked.setdefault(method, []).append(answer)
            return SimpleNamespace(future=lambda: answer)

        return SimpleNamespace(remote=remote)


class FirstStarts(Actor):
    """A replica that loads at once."""

    def __getattr__(self, method: str) -> Any:
        made = super().__getattr__(method)
        if method != "load":
            return made

        def remote(*args: Any) -> Any:
            reference = made.remote(*args)
            reference.future().set_result(Description(frozenset(), ByteTokenizer(), 258, None))
            return reference

        return SimpleNamespace(remote=remote)


class FakeRay:
    """Starts actors, the first of which loads at once and the others never."""

    exceptions = SimpleNamespace(
        RayError=RayError,
        RayTaskError=type("RayTaskError", (RayError,), {}),
        TaskCancelledError=type("TaskCancelledError", (RayError,), {}),
    )

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.actors: list[Actor] = []

    def remote(self, cls: type) -> Any:
        return SimpleNamespace(options=lambda **asked: SimpleNamespace(remote=self._start))

    def _start(self) -> Actor:
        self.actors.append(Actor() if self.actors else FirstStarts())
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        pass

    def wait(self, references: list[Any], timeout: float) -> tuple[list[Any], list[Any]]:
        done = [each for each in references if each.future().done()]
        self.clock.now += 0.0 if done else timeout
        return done, [each for each in references if each not in done]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("genlm.ray.fleet.time", clock)
    return clock


def fleet_of_one(clock: Clock) -> tuple[FakeRay, Fleet]:
    ray = FakeRay(clock)
    return ray, Fleet(ray, "mock", RayOptions(replicas=1, start_timeout=600.0))


def test_replicas_that_are_away_for_too_long_are_a_clear_error(clock: Clock) -> None:
    ray, fleet = fleet_of_one(clock)
    fleet.wake()
    fleet.step([Query((1, 2))], [])
    ray.actors[0].asked["rows"][0].set_exception(RayError("it was killed"))
    assert fleet.step([], []) == []
    assert len(ray.actors) == 2, "it was not started again"
    clock.now += 600.0
    with pytest.raises(EngineDeadError, match=r"start_timeout=600 seconds.*load the model again"):
        fleet.step([], [])


def test_a_replica_that_stays_silent_counts_as_dead(clock: Clock) -> None:
    ray, fleet = fleet_of_one(clock)

    def step(seconds: float) -> None:
        clock.now += seconds
        fleet.wake()
        fleet.step([], [])

    fleet.wake()
    fleet.step([Query((1, 2))], [])
    step(PULSE)
    step(1e6)  # the program itself was stopped: that is one ping without an answer, no more
    for _ in range(SILENT - 2):
        step(PULSE)
    ray.actors[0].asked["ping"][-1].set_result(None)
    for _ in range(SILENT):
        step(PULSE)
        assert len(ray.actors) == 1, "it had answered"
    step(PULSE)
    assert len(ray.actors) == 2


def test_a_change_of_state_does_not_wait_for_ever_for_a_replica_that_hangs(clock: Clock) -> None:
    """It counts as dead, and has the new state when it starts again."""
    ray, fleet = fleet_of_one(clock)
    fleet.clear()
    assert len(ray.actors[0].asked["clear"]) == 1
    assert len(ray.actors) == 2
    assert clock.now <= (SILENT + 2) * PULSE
