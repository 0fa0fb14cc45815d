"""What the engine does when vLLM fails in ways that a healthy one cannot be made to: over a
stand-in for its core."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from genlm.core.errors import EngineDeadError, EngineError
from genlm.core.types import Query, SampleRequest, SamplingParams
from genlm.vllm.capture import ROW_KEY, RowStore
from genlm.vllm.engine import VllmEngine
from genlm.vllm.internals import Output
from genlm.vllm.rows import LocalRows
from genlm.vllm.sessions import Sessions

WIDTH = 5
QUERY = Query((1, 2, 3))


class Core:
    """Draws a token for every request in each step, until it is told to do otherwise."""

    vocab_size, max_model_len, max_num_batched_tokens, longest_chunk = WIDTH, 100, 64, 64
    device_type, prefix_caching, max_positions = "cuda", True, None

    def __init__(self) -> None:
        self.store = RowStore()
        self.held: set[str] = set()  # requests that it works on or holds
        # What it works on: the key of the row that is wanted, and the tokens still to draw.
        self.pending: dict[str, tuple[str | None, int]] = {}
        self.slow = 0  # steps in which it only computes prompts
        self.trouble: Exception | None = None  # raised by the next step
        self.cannot_abort: Exception | None = None
        self.dead = self.stuck = False
        self.finish: str | None = None  # why it ends requests without drawing

    sessions_run = False

    def footprint(self, length: int) -> int:
        return length + 1

    def add(
        self,
        request_id,
        token_ids,
        params,
        adapter,
        *,
        resumable=False,
        cache_salt=None,
        pinned=False,
    ):
        self.held.add(request_id)
        self.pending[request_id] = (params.extra_args or {}).get(ROW_KEY), params.max_tokens

    def extend(self, request_id, token_ids, params, adapter):
        self.add(request_id, token_ids, params, adapter)

    def step(self) -> list[Output]:
        if self.trouble is not None:
            trouble, self.trouble = self.trouble, None
            raise trouble
        if self.stuck:
            return []
        if self.slow:
            self.slow -= 1
            return []
        keys = [key for key, _ in self.pending.values() if key is not None]
        self.store.put(keys, torch.zeros(len(keys), WIDTH).log_softmax(-1))
        outputs = []
        for request_id, (key, left) in list(self.pending.items()):
            end = self.finish or ("length" if left == 1 else None)
            outputs.append(Output(request_id, [] if self.finish else [4], end))
            self.pending[request_id] = key, left - 1
            if end:
                del self.pending[request_id]
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
def engine(core, driven):
    rows = LocalRows(core.store, "cpu")
    sessions = Sessions(limit=4, capacity=1000, footprint=core.footprint, longest=100, reach=8)
    llm = SimpleNamespace(get_tokenizer=lambda: range(WIDTH), collective_rpc=lambda method: [None])
    return driven(VllmEngine(llm, core, rows, sessions, live=True))


def test_a_failed_step_leaves_no_request_with_vllm(engine, core):
    engine.step(Query((1,)))
    core.trouble = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(QUERY, Query((1, 2)))
    assert core.held == set(), "the live session has gone as well"
    (row,) = engine.ask(QUERY)
    assert row.shape == (WIDTH,)


def test_memory_that_runs_out_has_a_remedy(engine, core):
    core.trouble = RuntimeError("DefaultCPUAllocator: can't allocate memory")
    with pytest.raises(EngineError, match=r"can't allocate .*; lower max_num_batched_tokens"):
        engine.step(QUERY)


def test_a_dead_engine_is_said_to_be_dead(engine, core):
    core.trouble, core.dead = RuntimeError("the worker has gone"), True
    with pytest.raises(EngineDeadError, match=r"the worker has gone.*load the model again"):
        engine.step(QUERY)


def test_an_engine_that_cannot_drop_its_requests_is_dead(engine, core):
    core.trouble, core.cannot_abort = RuntimeError("first"), RuntimeError("no channel")
    with pytest.raises(EngineDeadError, match="no channel"):
        engine.step(QUERY)


def test_an_engine_that_does_not_let_go_of_its_state_is_dead(engine, core):
    core.held.add("a request that nobody made")
    with pytest.raises(EngineDeadError, match="key/value state"):
        engine.genlm_clear_kv_cache()


def test_a_request_that_vllm_ends_without_a_row_fails_alone(engine, core):
    core.finish = "error"
    (row,) = engine.ask(QUERY)
    assert isinstance(row, EngineError)
    core.finish = None
    (row,) = engine.ask(QUERY)
    assert row.shape == (WIDTH,)


def advance(engine, steps):
    for _ in range(steps):
        engine.step()


def test_an_engine_that_finishes_nothing_is_given_up(engine, core):
    core.stuck = True
    engine.step(QUERY)
    with pytest.raises(EngineError, match="kv_cache_memory_bytes"):
        advance(engine, 10_000)
    core.stuck = False
    (row,) = engine.ask(QUERY)
    assert row.shape == (WIDTH,)


# --- draws ----------------------------------------------------------------------------------------


def request(max_tokens: int, stop: int | None = None) -> SampleRequest:
    stops = frozenset() if stop is None else frozenset({stop})
    return SampleRequest(QUERY, SamplingParams(max_tokens=max_tokens, stop_token_ids=stops))


def test_a_draw_may_take_more_steps_than_an_engine_is_given_to_compute_something(engine, core):
    draws = [request(20_000), request(5000), request(10)]
    engine.step(*draws)
    answers = {}
    for _ in range(20_000):
        answers |= engine.step()
    assert [len(answers[each]) for each in draws] == [20_000, 5000, 10]


def test_what_is_dropped_is_let_go_and_never_answered(engine, core):
    draw, row, kept = request(9), Query((7, 8)), request(3)
    core.slow = 3  # steps until prompts are computed
    engine.step(draw, row, kept)
    assert engine.step(dropped=[draw, row]) == {}
    assert len(core.held) == 1
    answers = {}
    for _ in range(6):
        answers |= engine.step()
    assert list(answers) == [kept]
    engine.step(dropped=[draw])  # again, and for one that has gone
