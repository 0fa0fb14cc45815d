"""``then`` over replicas: functions travel once, arguments with the requests, and only results come
back."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from genlm.core import (
    AsyncLM,
    EngineDeadError,
    EngineError,
    InvalidInputError,
    load_model_by_name,
    together,
)
from genlm.core.reductions import draw_among
from tests.particle_forms import ALLOWED, FORMS, smc

Fleet = Callable[..., AsyncLM]


def gathered(*asked: Any) -> list[Any]:
    async def together() -> list[Any]:
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(together())


def here(function: Callable[..., Any]) -> together[Any]:
    """Marks a function of this module, which replicas cannot import, so that it is sent with its
    code."""
    function.__module__ = "__main__"
    return together(function)


def test_all_forms_of_a_program_give_the_particles_of_one_process(fleet: Fleet) -> None:
    import ray

    ray.cloudpickle.register_pickle_by_value(sys.modules["tests.particle_forms"])
    lm = fleet(backend_opts={"max_context": 64})
    with load_model_by_name("mock", "mock", max_context=64) as alone:
        expected = asyncio.run(smc(FORMS[0], alone))
    for form in FORMS:
        texts, constant, times = asyncio.run(smc(form, lm))
        assert (texts, times) == expected[::2]
        assert constant == pytest.approx(expected[1], abs=1e-9)


def test_function_of_rows_runs_in_the_replica_and_no_row_travels(fleet: Fleet) -> None:
    lm = fleet()

    @here
    def places(rows: Any, values: Any) -> list[Any]:
        return [
            (os.getpid(), int(row.argmax()), each) for row, each in zip(rows, values, strict=True)
        ]

    asked = (lm.next_token_logprobs([at, 1], then=places(at)) for at in range(64))
    found = gathered(*asked)
    assert os.getpid() not in {place for place, *_ in found}
    assert (lm.stats.rows, lm.stats.reductions) == (0, 64)
    rows = lm.batch_next_token_logprobs_sync([[at, 1] for at in range(64)])
    assert [(best, each) for _, best, each in found] == [
        (int(row.argmax()), at) for at, row in enumerate(rows)
    ]
    batch = lm.batch_next_token_logprobs_sync([[at, 1] for at in range(9)], then=places("all"))
    assert [best for _, best, _ in batch] == [best for _, best, _ in found[:9]]


class Counted:
    """Counts how often a process has loaded it."""

    def __reduce__(self) -> Any:
        return eval, ("vars(__import__('builtins')).__setitem__('_loads', vars(__import__("
                      "'builtins')).get('_loads', 0) + 1)",), None  # fmt: skip


def test_function_is_sent_to_each_replica_once(fleet: Fleet) -> None:
    lm, marker = fleet(), Counted()

    @here
    def loads(rows: Any) -> list[Any]:
        import builtins

        return [(os.getpid(), vars(builtins)["_loads"], marker is None)] * len(rows)

    for step in range(4):
        found = gathered(*(lm.next_token_logprobs([step, at], then=loads()) for at in range(40)))
        assert {count for _, count, _ in found} == {1}
    assert len({place for place, *_ in found}) == 2  # both replicas


def test_unpicklable_function_is_rejected_by_name_and_fails_no_other(fleet: Fleet) -> None:
    lm, lock = fleet(), threading.Lock()

    @here
    def locked(rows: Any) -> list[Any]:
        with lock:
            return [1] * len(rows)

    @here
    def same(rows: Any, values: Any) -> list[Any]:
        return list(values)

    @here
    def unreadable(rows: Any, values: Any) -> list[Any]:
        return [threading.Lock() if value else value for value in values]

    function, argument, result, right, also = gathered(
        lm.next_token_logprobs([1], then=locked()),
        lm.next_token_logprobs([2], then=same(lock)),
        lm.next_token_logprobs([3], then=unreadable(1)),
        lm.next_token_logprobs([4], then=same("right")),
        lm.next_token_logprobs([5], then=unreadable(0)),
    )
    assert isinstance(function, InvalidInputError)
    assert "locked" in str(function)
    assert isinstance(argument, InvalidInputError)
    assert "lock" in str(argument)
    assert isinstance(result, EngineError)
    assert "can be pickled" in str(result)
    assert (right, also) == ("right", 0)


def test_exception_of_a_function_reaches_only_its_callers(fleet: Fleet) -> None:
    lm = fleet()

    @here
    def inverse(rows: Any, numbers: Any) -> list[float]:
        return [1 / number for number in numbers]

    @here
    def ended(rows: Any) -> list[Any]:
        raise EngineDeadError("another model")

    outcomes = gathered(
        *(lm.next_token_logprobs([at], then=inverse(at % 5)) for at in range(20)),
        lm.next_token_logprobs([99], then=ended()),
    )
    for at, outcome in enumerate(outcomes[:20]):
        right = isinstance(outcome, ZeroDivisionError) if at % 5 == 0 else outcome == 1 / (at % 5)
        assert right, (at, outcome)
    assert isinstance(outcomes[20], EngineError)
    assert lm.next_token_logprobs_sync([1], then=inverse(2)) == 0.5


def test_a_function_that_kills_its_replica_fails_its_caller_alone(fleet: Fleet) -> None:
    lm = fleet(replicas=3)

    @here
    def deadly(rows: Any, values: Any) -> list[Any]:
        if "die" in values:
            os._exit(1)
        return list(values)

    async def program() -> list[Any]:
        asked = [lm.next_token_logprobs([at], then=deadly(at)) for at in range(30)]
        asked.insert(11, lm.next_token_logprobs([99], then=deadly("die")))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 300)

    outcomes = asyncio.run(program())
    killer = outcomes.pop(11)
    assert isinstance(killer, EngineError)
    assert outcomes == [*range(30)]


def test_a_function_that_does_not_return_fails_its_callers_alone(fleet: Fleet) -> None:
    """The replica is replaced, and rows and other functions that waited behind it are answered."""
    lm = fleet(function_timeout=2.0)
    before = [handle._actor_id for handle in lm.underlying_model]

    @here
    def hangs(rows: Any, values: Any) -> list[Any]:
        import threading

        threading.Event().wait()
        return list(values)

    @here
    def same(rows: Any, values: Any) -> list[Any]:
        return list(values)

    async def program() -> list[Any]:
        asked = [lm.next_token_logprobs([at], then=same(at)) for at in range(60)]
        asked += [lm.next_token_logprobs([at, 1]) for at in range(60)]
        asked[11:11] = [lm.next_token_logprobs([99, at], then=hangs(at)) for at in range(3)]
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 300)

    outcomes = asyncio.run(program())
    for error in (outcomes.pop(11) for _ in range(3)):
        assert isinstance(error, EngineError)
        assert "hangs" in str(error)
        assert "function_timeout=2 seconds" in str(error)
    assert outcomes[:60] == [*range(60)]
    with load_model_by_name("mock", "mock") as alone:
        rows = alone.batch_next_token_logprobs_sync([[at, 1] for at in range(60)])
    torch.testing.assert_close(torch.stack(outcomes[60:]), rows)
    assert lm.next_token_logprobs_sync([5], then=same("after")) == "after"
    assert [handle._actor_id for handle in lm.underlying_model] != before


def test_masks_and_adapters_are_sent_with_functions(
    fleet: Fleet, tiny: str, lora_folders: dict[str, str]
) -> None:
    pytest.importorskip("transformers", reason="a real model needs transformers")
    lm = fleet(tiny, "hf")
    among = draw_among(ALLOWED)
    with load_model_by_name(tiny, "hf") as alone:
        for each in (lm, alone):
            each.add_new_lora(lora_folders["a"], "a")
        for adapter in (None, "a"):
            asked = [([at, 7], at / 30) for at in range(30)]
            found, expected = (
                gathered(*(m.next_token_logprobs(ids, adapter, then=among(u)) for ids, u in asked))
                for m in (lm, alone)
            )
            assert [token for token, _ in found] == [token for token, _ in expected]
            assert [mass for _, mass in found] == pytest.approx(
                [mass for _, mass in expected], abs=1e-4
            )


def test_wrappers_change_rows_in_the_program_before_the_function(fleet: Fleet) -> None:
    from genlm.core import hookimpl

    class Only:
        @hookimpl
        def genlm_process_logprobs(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.full_like(rows, -torch.inf).index_fill_(1, torch.tensor([5]), 0.0)

    opts = {"backend": "mock", "replicas": 1}
    with load_model_by_name("mock", "ray", opts, wrappers=[Only()]) as lm:
        assert lm.next_token_logprobs_sync([1], then=draw_among(None)(0.3)) == (5, 0.0)
        assert (lm.stats.rows, lm.stats.reductions) == (1, 0)
