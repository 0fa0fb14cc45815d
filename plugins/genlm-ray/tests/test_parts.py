"""Parts of the plugin, each by itself, without a cluster."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genlm.core import AsyncLM, Query, hookimpl
from genlm.core.mock import ByteTokenizer
from genlm.ray.cluster import Cluster
from genlm.ray.engine import RayEngine
from genlm.ray.options import RayOptions
from genlm.ray.replica import ProgramSession, Replica
from genlm.ray.wire import HOOKS, Busy, Description


def engine_whose_replicas_have(monkeypatch: pytest.MonkeyPatch, *hooks: str) -> RayEngine:
    """An engine whose fleet does nothing."""
    described = Description(frozenset(hooks), ByteTokenizer(), 258, None)
    monkeypatch.setattr(RayEngine, "_run", lambda self: None)
    monkeypatch.setattr(RayEngine, "_await_start", lambda self: described)
    monkeypatch.setattr(RayEngine, "genlm_close", hookimpl(lambda self: None))
    return RayEngine(SimpleNamespace(), "any", RayOptions())


@pytest.mark.parametrize("hooks", [(), HOOKS[:2], HOOKS])
def test_it_has_the_hooks_of_the_inner_engine(
    monkeypatch: pytest.MonkeyPatch, hooks: tuple[str, ...]
) -> None:
    engine = engine_whose_replicas_have(monkeypatch, *hooks)
    with AsyncLM(lambda: engine, backend="ray") as lm:
        assert [hook for hook in HOOKS if lm.supports(hook)] == [*hooks]


def test_a_step_gives_all_that_has_come_but_what_was_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_whose_replicas_have(monkeypatch, *HOOKS)
    row = torch.zeros(258)
    first, second, third = asked = [Query((token,)) for token in (1, 2, 3)]
    for query in asked:
        engine._answers.put([(query, row)])
    assert [answer.request for answer in engine.genlm_step(asked, [], [], [])] == asked
    engine.genlm_wake()
    assert engine.genlm_step([first, second], [], [], []) == []
    engine._answers.put([(first, row)])
    engine._answers.put([(second, row), (third, row)])
    answers = engine.genlm_step([], [], [], [second])
    assert [answer.request for answer in answers] == [first], "nobody waits for the others"


def test_suspects_of_one_program_are_tried_at_a_time() -> None:
    replica, mine, yours = Replica(), ProgramSession(1), ProgramSession(1)
    refused = pytest.raises(Busy, match="another program tries suspects")
    with replica._trial(mine), replica._trial(mine), refused, replica._trial(yours):
        pass
    with replica._trial(yours), replica._trial(yours):
        pass


def test_the_connection_ends_with_the_last_model_that_uses_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    models = []
    for _ in range(2):
        models.append(Cluster.__new__(Cluster))
        models[-1].ray = SimpleNamespace(shutdown=lambda: ended.append("the connection"))
        models[-1]._ours = True
    monkeypatch.setattr(Cluster, "_users", 2)
    monkeypatch.setattr(Cluster, "_joined", "somewhere")
    models[0].leave()
    models[0].leave()
    assert (ended, Cluster._users) == ([], 1)
    models[1].leave()
    assert ended == ["the connection"]
    assert Cluster._joined is None
