"""What the engine does when vLLM fails in ways that a healthy one cannot be made to: over a
stand-in for its core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genlm.core.errors import EngineDeadError, EngineError
from genlm.core.types import Query, SamplingParams
from genlm.vllm.capture import ROW_KEY, RowStore
from genlm.vllm.engine import VllmEngine
from genlm.vllm.internals import Output
from genlm.vllm.rows import LocalRows
from genlm.vllm.sessions import Sessions

WIDTH = 5
QUERY = Query((1, 2, 3))


class Core:
    """Answers every request in one step, until it is told to do otherwise."""

    vocab_size, max_model_len, max_num_batched_tokens = WIDTH, 100, 64
    device_type, prefix_caching = "cuda", True

    def __init__(self) -> None:
        self.store = RowStore()
        self.held: set[str] = set()  # requests that it works on or holds
        # What it works on, with the key of the row that is wanted.
        self.pending: dict[str, int | None] = {}
        self.trouble: Exception | None = None  # raised by the next step
        self.cannot_abort: Exception | None = None
        self.dead = self.stuck = False
        self.finish: str | None = None  # why it ends requests without drawing

    def footprint(self, length: int) -> int:
        return length + 1

    def add(self, request_id, token_ids, params, adapter, *, resumable=False, cache_salt=None):
        self.held.add(request_id)
        self.pending[request_id] = (params.extra_args or {}).get(ROW_KEY)

    def step(self) -> list[Output]:
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble
        if self.stuck:
            return []
        keys = [key for key in self.pending.values() if key is not None]
        self.store.put(keys, torch.zeros(len(keys), WIDTH).log_softmax(-1))
        drawn = [] if self.finish else [4]
        outputs = [Output(request_id, drawn, self.finish) for request_id in self.pending]
        self.pending.clear()
        return outputs

    def abort(self, request_ids):
        if self.cannot_abort is not None:
            raise self.cannot_abort
        for request_id in request_ids:
            self.held.discard(request_id)
            self.pending.pop(request_id, None)

    def reset_prefix_cache(self) -> bool:
        return not self.held

    def is_dead(self, error: BaseException) -> bool:
        return self.dead


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def engine(core):
    rows = LocalRows(core.store, "cpu")
    sessions = Sessions(limit=4, capacity=1000, footprint=core.footprint, longest=100, reach=8)
    llm = SimpleNamespace(get_tokenizer=lambda: range(WIDTH), collective_rpc=lambda method: [None])
    return VllmEngine(llm, core, rows, sessions, live=True)


def test_a_failed_step_leaves_no_request_with_vllm(engine, core):
    engine.genlm_step([Query((1,))])
    core.trouble = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.genlm_step([QUERY, Query((1, 2))])
    assert core.held == set(), "the live session has gone as well"
    (answer,) = engine.genlm_step([QUERY])
    assert answer.row.shape == (WIDTH,)


def test_a_failed_draw_leaves_no_request_with_vllm(engine, core):
    core.trouble = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.genlm_sample([QUERY], [SamplingParams(max_tokens=1)])
    assert core.held == set()


def test_a_dead_engine_is_said_to_be_dead(engine, core):
    core.trouble, core.dead = RuntimeError("the worker has gone"), True
    with pytest.raises(EngineDeadError, match=r"the worker has gone.*load the model again"):
        engine.genlm_step([QUERY])


def test_an_engine_that_cannot_drop_its_requests_is_dead(engine, core):
    core.trouble, core.cannot_abort = RuntimeError("first"), RuntimeError("no channel")
    with pytest.raises(EngineDeadError, match="no channel"):
        engine.genlm_step([QUERY])


def test_an_engine_that_does_not_let_go_of_its_state_is_dead(engine, core):
    core.held.add("a request that nobody made")
    with pytest.raises(EngineDeadError, match="key/value state"):
        engine.genlm_clear_kv_cache()


def test_a_request_that_vllm_ends_without_a_row_fails_alone(engine, core):
    core.finish = "error"
    (answer,) = engine.genlm_step([QUERY])
    assert isinstance(answer.row, EngineError)
    core.finish = None
    (answer,) = engine.genlm_step([QUERY])
    assert answer.row.shape == (WIDTH,)


def advance(engine, steps):
    for _ in range(steps):
        engine.genlm_step([])


def test_an_engine_that_finishes_nothing_is_given_up(engine, core):
    core.stuck = True
    engine.genlm_step([QUERY])
    with pytest.raises(EngineError, match="kv_cache_memory_bytes"):
        advance(engine, 10_000)
    core.stuck = False
    (answer,) = engine.genlm_step([QUERY])
    assert answer.row.shape == (WIDTH,)
