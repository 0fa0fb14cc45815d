"""Parts of the plugin, each by itself, without a cluster."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch

from genlm.core import (
    Adapter,
    Answer,
    AsyncLM,
    EngineError,
    MockAsyncLM,
    Query,
    hookimpl,
    together,
)
from genlm.core.errors import InvalidInputError, InvalidOptionError, UnsupportedError
from genlm.core.mock import ByteTokenizer, MockEngine
from genlm.ray.cluster import Cluster
from genlm.ray.engine import RayEngine
from genlm.ray.hangs import Caller, Hangs
from genlm.ray.line import Line
from genlm.ray.log import Entry
from genlm.ray.options import RayOptions
from genlm.ray.replica import ProgramSession, Replica
from genlm.ray.wire import HOOKS, Ask, Busy, Description, Gone, Token, received

from .conftest import PATIENCE


def engine_whose_replicas_have(
    monkeypatch: pytest.MonkeyPatch, *hooks: str, described: Description | None = None
) -> RayEngine:
    """An engine whose fleet does nothing."""
    described = described or Description(frozenset(hooks), ByteTokenizer(), 258, None)
    monkeypatch.setattr(Line, "start", lambda self: None)
    monkeypatch.setattr(Line, "send", lambda self, *call: None)
    monkeypatch.setattr(RayEngine, "_run", lambda self: None)
    monkeypatch.setattr(RayEngine, "_await_start", lambda self: described)
    monkeypatch.setattr(RayEngine, "genlm_close", hookimpl(lambda self: None))
    cluster: Any = SimpleNamespace(ray=SimpleNamespace(available_resources=dict))
    return RayEngine(cluster, "any", RayOptions())


@pytest.mark.parametrize("hooks", [(), HOOKS[:2], HOOKS])
def test_ray_engine_has_the_hooks_of_the_inner_engine(
    monkeypatch: pytest.MonkeyPatch, hooks: tuple[str, ...]
) -> None:
    engine = engine_whose_replicas_have(monkeypatch, *hooks)
    with AsyncLM(lambda: engine, backend="ray") as lm:
        assert [hook for hook in HOOKS if lm.supports(hook)] == [*hooks]


def test_error_explains_missing_lora_support(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MockEngine, "genlm_add_lora", None)
    why = {"genlm_add_lora": "the replicas lack peft"}
    monkeypatch.setattr(MockEngine, "lacking", why, raising=False)

    async def described() -> Description:
        replica: Any = Replica()
        description: Description = await replica.open(("mine", 1), None, 60.0, "mock", "mock", {})
        replica.lm.close()
        return description

    found = asyncio.run(described())
    engine = engine_whose_replicas_have(monkeypatch, described=found)
    refused = pytest.raises(UnsupportedError, match="'ray' has no LoRA: the replicas lack peft")
    with AsyncLM(lambda: engine, backend="ray") as lm, refused:
        lm.add_new_lora("folder", "a")


def test_interrupted_start_ends_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    await_start, wait, waits = RayEngine._await_start, concurrent.futures.wait, threading.Event()
    engine = engine_whose_replicas_have(monkeypatch)

    def start() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            await_start(engine)

    def waiting(*given: Any) -> Any:
        waits.set()
        return wait(*given)

    monkeypatch.setattr("concurrent.futures.wait", waiting)
    starting = threading.Thread(target=start, daemon=True)
    starting.start()
    assert waits.wait(PATIENCE)
    interrupt = ctypes.pythonapi.PyThreadState_SetAsyncExc
    interrupt(ctypes.c_ulong(starting.ident or 0), ctypes.py_object(KeyboardInterrupt))
    starting.join(PATIENCE)
    assert not starting.is_alive()


def test_step_waits_and_returns_all_answers_except_dropped_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = engine_whose_replicas_have(monkeypatch, *HOOKS)
    row = torch.zeros(258)
    first, second, third = asked = [Query((token,)) for token in (1, 2, 3)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        step = pool.submit(engine.genlm_step, asked, [], [], [], [])
        with pytest.raises(TimeoutError):
            step.result(timeout=0.1)
        engine._answers.put([Answer(query, row) for query in asked])
        assert [answer.request for answer in step.result()] == asked
    engine.genlm_wake()
    assert engine.genlm_step([first, second], [], [], [], []) == []
    engine._answers.put([Answer(first, row)])
    engine._answers.put([Answer(second, row), Answer(third, row)])
    answers = engine.genlm_step([], [], [], [], [second])
    assert [answer.request for answer in answers] == [first], "nobody waits for the others"


def test_only_one_program_tries_suspects_at_a_time() -> None:
    replica, mine, yours = Replica(), ProgramSession(1, 60.0), ProgramSession(1, 60.0)
    refused = pytest.raises(Busy, match="another program tries suspects")
    with replica._trial(mine), replica._trial(mine), refused, replica._trial(yours):
        pass
    with replica._trial(yours), replica._trial(yours):
        pass


class Fleet:
    """A fleet that carries out each order at once, and reports the given outcome."""

    def __init__(self, error: Exception | None) -> None:
        self.asked: list[Any] = []
        self.error = error

    def put(self, order: Callable[[], None]) -> None:
        order()

    def _ask(self, what: Entry | int, done: Callable[[Exception | None], None]) -> None:
        self.asked.append(what.apply[0] if isinstance(what, Entry) else what)
        done(self.error)

    add = remove_adapter = clear = _ask


@pytest.mark.parametrize("error", [None, EngineError("no replica takes it")])
def test_change_of_state_raises_the_fleets_error(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    engine = engine_whose_replicas_have(monkeypatch, *HOOKS)
    engine._fleet = engine._orders = fleet = Fleet(error)
    adapter = Adapter("a", "folder", version=7)
    for change in (
        lambda: engine.genlm_add_lora(adapter),
        lambda: engine.genlm_cache_prefix(Query((1,), adapter)),
        lambda: engine.genlm_clear_kv_cache(),
        lambda: engine.genlm_remove_lora(adapter),
    ):
        with contextlib.nullcontext() if error is None else pytest.raises(EngineError):
            assert change() is not False
    assert fleet.asked == ["add_adapter", "pin", "clear", 7]


class Model:
    """A model that records its calls, and answers only when it is allowed to."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.at_work, self.let = asyncio.Event(), asyncio.Event()

    def clear_kv_cache(self) -> None:
        self.done.append(("clear",))

    def cache_kv(self, ids: list[int], lora_name: str | None) -> None:
        self.done.append(("pin", *ids))

    def add_new_lora(self, path: str, name: str) -> None:
        self.done.append(("add", name))

    def remove_lora(self, name: str) -> None:
        self.done.append(("remove", name))

    async def next_token_logprobs(self, ids: list[int], lora_name: str | None) -> torch.Tensor:
        self.at_work.set()
        await self.let.wait()
        return torch.zeros(258)


def replica_with(*programs: str) -> tuple[Any, Model, list[Token]]:
    """A replica that has loaded, and the programs' sessions."""
    replica: Any = Replica()
    replica.lm = model = Model()
    replica._sessions |= {program: ProgramSession(1, 60.0) for program in programs}
    return replica, model, [(program, 1) for program in programs]


def asked(token_id: int, adapter: str | None = None) -> Ask:
    return ((token_id,),), adapter, False, None, None, None


def test_sessions_on_a_replica_are_separate() -> None:
    replica, model, (yours, mine) = replica_with("yours", "mine")

    async def changes() -> list[list[tuple[Any, ...]]]:
        found = []
        for change in (
            lambda: replica.pin(yours, asked(1)),
            lambda: replica.add_adapter(mine, "a", "folder"),
            lambda: replica.pin(mine, asked(2, "a")),
            lambda: replica.pin(mine, asked(3)),
            lambda: replica.remove_adapter(mine, "a"),
            lambda: replica.pin(mine, asked(4)),
            lambda: replica.unpin(mine, asked(4)),
            lambda: replica.clear(mine),
            lambda: replica.pin(mine, asked(5)),
            lambda: replica.add_adapter(mine, "b", "folder"),
            lambda: replica.leave(mine, end=False),
        ):
            await change()
            found.append(model.done.copy())
            model.done.clear()
        return found

    assert asyncio.run(changes()) == [
        [("pin", 1)],
        [("add", "a")],
        [("pin", 2)],
        [("pin", 3)],
        [("remove", "a")],
        [("pin", 4)],
        [("clear",), ("pin", 1), ("pin", 3)],
        [("clear",), ("pin", 1)],
        [("pin", 5)],
        [("add", "b")],
        [("remove", "b"), ("clear",), ("pin", 1)],
    ]


def test_rows_are_sent_with_the_tokenizers_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "__len__", lambda self: 250)

    async def widths() -> list[int]:
        replica: Any = Replica()
        described = await replica.open(("mine", 1), None, 60.0, "mock", "mock", {})
        cold = ((1,),), None, True, None, None, None
        rows = received(await replica.answer(("mine", 1), [asked(1), cold], False))
        replica.lm.close()
        return [described.vocab_size, *map(len, rows)]

    assert asyncio.run(widths()) == [250, 250, 250]


def test_function_that_cannot_be_loaded_fails_only_its_callers() -> None:
    """The other callers of the message share one call of their function."""

    def counted(rows: Any, values: Any) -> list[Any]:
        return [(len(rows), value) for value in values]

    codes = {"loads": ray.cloudpickle.dumps(together(counted)), "does not": b"junk"}
    keys = ["loads", "does not"] * 3
    calls: list[Ask] = [
        (((at,),), None, False, None, None, (key, codes[key], (at,))) for at, key in enumerate(keys)
    ]

    async def answers() -> Sequence[Any]:
        replica: Any = Replica()
        await replica.open(("mine", 1), None, 60.0, "mock", "mock", {})
        arrived = received(await replica.answer(("mine", 1), calls, False))
        replica.lm.close()
        return arrived

    found = asyncio.run(answers())
    assert [*found[::2]] == [(3, 0), (3, 2), (3, 4)]
    for error in found[1::2]:
        assert isinstance(error, InvalidInputError)
        assert "cannot be loaded" in str(error)


def test_replica_uses_the_given_cache_size() -> None:
    async def kept(options: dict[str, Any]) -> int | None:
        replica: Any = Replica()
        await replica.open(("mine", 1), None, 60.0, "mock", "mock", options)
        with replica.lm as lm:
            return lm._cache.maxsize

    own = {"cache_opts": {"maxsize": 10}}
    assert [asyncio.run(kept(options)) for options in ({}, {"cache_size": 9}, own)] == [0, 9, 10]


class Sharper:
    """Takes its second row as it is."""

    def __init__(self, power: int) -> None:
        self.power = power

    @hookimpl
    def genlm_process_logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        power, self.power = self.power, 1
        return (power * rows).log_softmax(-1)


def test_programs_share_a_replica_with_equal_wrappers() -> None:
    async def joined(replica: Any, power: int) -> None:
        loading = None, 60.0, "mock", "mock", {"wrappers": [Sharper(power)]}
        await replica.open((f"to the power {power}", 1), *loading)

    async def programs() -> None:
        replica: Any = Replica()
        await joined(replica, 2)
        replica.lm.next_token_logprobs_sync([1])
        await joined(replica, 2)
        with pytest.raises(InvalidOptionError, match="Sharper"):
            await joined(replica, 3)
        replica.lm.close()

    asyncio.run(programs())


def test_an_installed_wrapper_changes_rows_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the program."""
    monkeypatch.setattr("genlm.core.lm.installed_wrappers", lambda: [Sharper(2)])

    async def row() -> torch.Tensor:
        replica: Any = Replica()
        await replica.open(("mine", 1), None, 60.0, "mock", "mock", {})
        with replica.lm as lm:
            return await lm.next_token_logprobs([1])

    with MockAsyncLM() as mock:
        own = asyncio.run(row())
        assert (2 * own).log_softmax(-1).equal(mock.next_token_logprobs_sync([1]))


def test_requests_end_only_with_their_own_session() -> None:
    replica, model, (mine, yours) = replica_with("mine", "yours")

    async def one_leaves() -> None:
        calls = []
        for token in (mine, yours):
            answer = replica.answer(token, [asked(1)], False)
            calls.append(asyncio.create_task(answer))
            await model.at_work.wait()
            model.at_work.clear()
        await replica._finish("mine")
        model.let.set()
        with pytest.raises(Gone, match="it had not been heard of"):
            await calls[0]
        (row,) = received(await calls[1])
        assert row.shape == (258,)
        with pytest.raises(Gone, match="does not know the program"):
            await replica.answer(mine, [], False)
        with pytest.raises(Gone, match="does not know the program"):
            await replica.answer(("yours", 2), [], False)

    asyncio.run(one_leaves())


@pytest.mark.parametrize("there", [True, False])
def test_silent_replica_is_ended_by_the_program_that_made_it(
    monkeypatch: pytest.MonkeyPatch, there: bool
) -> None:
    """A joined replica may be busy with other programs' requests."""

    def find(name: str, namespace: str) -> object:
        if not there:
            raise ValueError(f"no actor has the name {name!r}")
        return object()

    def look(left: object, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError

    monkeypatch.setattr(ray, "get_actor", find)
    monkeypatch.setattr(ray, "get", look)
    actors: Any = SimpleNamespace(options=lambda **given: SimpleNamespace(remote=object))
    monkeypatch.setattr("genlm.ray.line.ACTOR", actors)
    line = Line(0, {"name": "genlm-shared-0"}, [None], lambda *came: None)
    line.start()
    assert line.failure is None
    assert line.may_end(object()) is (not there)


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A stand-in for Ray's connection: empty, or the address to which it leads."""
    leads: list[str] = []
    monkeypatch.setattr(Cluster, "_users", set())
    monkeypatch.setattr("genlm.ray.cluster.connect", lambda ray, address: leads.append(address))
    monkeypatch.setattr(ray, "is_initialized", lambda: bool(leads))
    monkeypatch.setattr(ray, "shutdown", leads.clear)
    return leads


def test_the_connection_ends_with_the_last_model_that_uses_it(connection: list[str]) -> None:
    models = [Cluster("somewhere"), Cluster("somewhere")]
    with pytest.raises(InvalidOptionError, match=r"connected to the cluster 'somewhere'.*one at a"):
        Cluster("elsewhere")
    models[0].leave()
    models[0].leave()
    assert connection == ["somewhere"]
    models[1].leave()
    assert connection == []


@pytest.mark.parametrize("by_program", [True, False])
def test_model_without_its_connection_ends_no_other_connection(
    connection: list[str], by_program: bool
) -> None:
    model = Cluster("somewhere")
    ray.shutdown()
    assert not model.connected
    if by_program:
        connection.append("elsewhere")
    other = Cluster("elsewhere")
    model.leave()
    assert connection == ["elsewhere"]
    other.leave()
    assert connection == (["elsewhere"] if by_program else [])


# --- functions that hang --------------------------------------------------------------------------


def test_call_hangs_once_it_exceeds_the_patience_of_a_caller() -> None:
    hangs, found = Hangs(), []

    @together
    def looked_at(rows: Any, times: list[list[float]]) -> list[int]:
        found.append([running and running.name for running in map(hangs.look, times[0])])
        return [1] * len(rows)

    watched, row = hangs.watched(looked_at), torch.zeros(3)
    patient, other = Caller(3.0), Caller(60.0)
    asked = [(patient, [0.0, 1.0, 2.0, 2.9]), (other, [4.0, 5.0, 64.0, 65.0]),
             (patient, [70.0, 71.0, 72.0, 73.0])]  # fmt: skip
    for caller, times in asked:
        assert watched.results_of([(watched(caller, times), (row,))]) == [1]
    name = repr(looked_at)
    # 59 seconds between two checks mean that the process was stopped.
    assert found == [[None] * 4, [None] * 4, [None, None, None, name]]
    assert hangs.look(99.0) is None
