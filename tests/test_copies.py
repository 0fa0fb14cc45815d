"""Callers and the cache have copies: how many operations make them, and whose memory they are."""

from __future__ import annotations

import concurrent.futures
import math
import weakref

import numpy as np
import pytest
import torch

from genlm.core import Answer, AsyncLM, EngineError, MockAsyncLM, Query, cache, hookimpl
from genlm.core.copies import copies_of
from genlm.core.errors import PluginError
from genlm.core.mock import ByteTokenizer, hashed_row
from genlm.core.runtime.calls import Call, keep_own
from tools.launched import Launched

from .conftest import gathered
from .doubles import Processor

WIDTH = len(ByteTokenizer())


class Engine:
    """An engine that returns one tensor for all rows of a step, and counts the operations of its
    thread."""

    tokenizer = ByteTokenizer()
    device, max_context = "cpu", None

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.model = Launched()
        self.model.__enter__()  # the mode belongs to the thread that loads and then evaluates

    @hookimpl
    def genlm_step(self, queries):
        ids = torch.tensor([[query.token_ids[-1]] for query in queries])
        rows = torch.zeros(len(queries), self.vocab_size).scatter_(1, ids, 2.0).log_softmax(-1)
        return [Answer(query, row) for query, row in zip(queries, rows, strict=True)]

    @hookimpl
    def genlm_close(self):
        self.model.__exit__(None, None, None)


class WithoutPadding(Engine):
    """An engine that removes the rows' padding itself, optionally in every second row only."""

    mixed = False

    @hookimpl
    def genlm_step(self, queries, width):
        answers = super().genlm_step(queries)
        rows = torch.stack([answer.result[:width] for answer in answers]).log_softmax(-1)
        narrow = [Answer(query, row) for query, row in zip(queries, rows, strict=True)]
        return [*narrow[::2], *answers[1::2]] if self.mixed else narrow


def rows_of(lm: AsyncLM, n: int, context: list[int]) -> tuple[list[torch.Tensor], int]:
    """The rows of ``n`` contexts asked together, and how many operations that took."""
    before = lm.underlying_model.count
    rows = gathered(*(lm.next_token_logprobs([*context, i]) for i in range(n)))
    return rows, lm.underlying_model.count - before


@pytest.mark.parametrize("surplus", [0, 6, -6])
def test_operations_of_a_step_do_not_depend_on_the_number_of_rows(surplus: int) -> None:
    with AsyncLM(lambda: Engine(WIDTH + surplus), backend="mine", check=False) as lm:
        (one,), few = rows_of(lm, 1, [7])
        rows, many = rows_of(lm, 200, [8])
    assert one.shape == rows[199].shape == (WIDTH,)
    assert all(int(row.argmax()) == at for at, row in enumerate(rows))
    assert [float(row.logsumexp(0)) for row in rows] == pytest.approx([0.0] * 200, abs=1e-5)
    assert many == few > 2


def test_unpadded_rows_cost_the_core_no_further_operation() -> None:
    found = []
    for engine, surplus in ((Engine, 6), (WithoutPadding, 6), (WithoutPadding, 0)):
        with AsyncLM(lambda: engine(WIDTH + surplus), backend="mine", check=False) as lm:  # noqa: B023
            found.append(rows_of(lm, 20, [7]))
    (rows, _), (narrow, by_the_engine), (_, without_padding) = found
    torch.testing.assert_close(torch.stack(narrow), torch.stack(rows))
    assert by_the_engine == without_padding


@pytest.mark.parametrize("wrappers", [(), (Processor(lambda queries, rows: rows.clone()),)])
def test_a_step_may_give_rows_with_and_without_padding(wrappers, monkeypatch) -> None:
    monkeypatch.setattr(WithoutPadding, "mixed", True)
    with AsyncLM(
        lambda: WithoutPadding(WIDTH + 6), backend="mine", check=True, wrappers=wrappers
    ) as lm:
        rows, _ = rows_of(lm, 5, [7])
        cold = lm.next_token_logprobs_uncached([7, 1])
    assert [int(row.argmax()) for row in (*rows, cold)] == [*range(5), 1]
    for row in rows:
        torch.testing.assert_close(row.sort().values, rows[0].sort().values)


def test_unnormalised_unpadded_row_is_the_engines_error() -> None:
    class Cut(Engine):
        @hookimpl
        def genlm_step(self, queries, width):
            return [Answer(query, row[:width]) for query, row in super().genlm_step(queries)]

    lm = AsyncLM(lambda: Cut(2 * WIDTH), backend="mine")
    with lm, pytest.raises(PluginError, match=r"logsumexp -0\.68"):
        lm.next_token_logprobs_sync([7])


def test_keeping_a_row_keeps_no_other_alive() -> None:
    with AsyncLM(lambda: Engine(WIDTH), backend="mine") as lm:
        rows, _ = rows_of(lm, 20, [7])
        rows[3].zero_()  # the row belongs to the caller
        again, _ = rows_of(lm, 20, [7])
    assert [int(row.argmax()) for row in again] == list(range(20))
    kept = cache.OutputCache()
    kept.put(enumerate(torch.zeros(20, WIDTH)), kept.generation)
    held = [*rows, *again, *(kept.peek(key) for key in range(20))]
    assert {row.untyped_storage().nbytes() for row in held} == {4 * WIDTH}


def test_a_copy_has_the_bits_of_its_row() -> None:
    rows = torch.tensor([[math.nan, -0.0, 0.0, math.inf, -math.inf, -1e-42], [-3.3] * 6])
    copied = torch.stack([*copies_of(rows.unbind())])
    assert copied.view(torch.int32).equal(rows.view(torch.int32))


class OneLongAtATime(Engine):
    """An engine that answers one long context and all short ones in a step, and knows which rows'
    memory is kept."""

    def __init__(self) -> None:
        super().__init__(WIDTH)
        self.waiting: list[Query] = []
        self.kept: list[weakref.ref[torch.Tensor]] = []
        self.most = 0

    @hookimpl
    def genlm_step(self, queries):
        self.most = max(self.most, sum(kept() is not None for kept in self.kept))
        self.waiting += [query for query in queries if query.length > 9]
        short = [query for query in queries if query.length <= 9]
        long, self.waiting = self.waiting[:1], self.waiting[1:]
        rows = torch.zeros(len(long + short), WIDTH).log_softmax(-1)
        self.kept.append(weakref.ref(rows))
        return [Answer(query, row) for query, row in zip(long + short, rows, strict=True)]


def test_a_call_that_takes_many_steps_keeps_none_of_their_other_rows() -> None:
    engine = OneLongAtATime()
    with AsyncLM(lambda: engine, backend="mine", cache_size=0) as lm:
        rows = lm.batch_next_token_logprobs_sync(
            [*([at] for at in range(9)), *[[7] * 10, [8] * 10]]
        )
        assert rows.exp().sum(-1).tolist() == pytest.approx([1.0] * 11)
    assert len(engine.kept) == 2
    assert engine.most == 0


class OneBuffer:
    """Writes its rows where it wrote those of the call before, as many as fit; rejects [9]."""

    tokenizer, vocab_size = ByteTokenizer(), WIDTH
    max_context, device, model = None, "cpu", None

    def __init__(self, rows: int = 8) -> None:
        self.buffer = torch.empty(rows, WIDTH)
        self.waiting: list[Query] = []

    def written(self, queries):
        if any(query.token_ids == (9,) for query in queries):
            raise KeyError("no such text")
        for row, query in zip(self.buffer, queries, strict=False):
            row.copy_(hashed_row(query.token_ids, None, WIDTH))
        return self.buffer[: len(queries)]


class Batches(OneBuffer):
    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return self.written(queries)


class Steps(OneBuffer):
    @hookimpl
    def genlm_step(self, queries):
        self.waiting += queries
        now = [self.waiting.pop(0) for _ in self.buffer[: len(self.waiting)]]
        return [*map(Answer, now, self.written(now))]


def is_own(rows, contexts) -> bool:
    """Whether rows are those of their contexts."""
    expected = [hashed_row(tuple(context), None, WIDTH) for context in contexts]
    return all(map(torch.equal, rows, expected))


def test_engine_may_reuse_the_memory_of_a_batch_after_an_error() -> None:
    contexts = [[1], [2], [3], [9], [4], [5]]
    with AsyncLM(Batches, backend="mine") as lm:
        rows = gathered(*map(lm.next_token_logprobs, contexts))
        assert isinstance(rows.pop(3), EngineError)
        del contexts[3]
        assert is_own(rows, contexts)
        assert is_own(map(lm.next_token_logprobs_sync, contexts), contexts)  # the cache
    assert lm.stats.cache_hits == 5


@pytest.mark.parametrize("engine", [Batches, Steps])
def test_engine_may_reuse_the_memory_of_the_same_callers_rows(engine) -> None:
    contexts = [[1], [2], [3]]
    with AsyncLM(lambda: engine(rows=1), backend="mine", batch_size=1) as lm:
        assert is_own(lm.batch_next_token_logprobs_sync(contexts), contexts)
        scores = lm.sequence_logprobs_sync([1], [2, 3])
    expected = hashed_row((1,), None, WIDTH)[2], hashed_row((1, 2), None, WIDTH)[3]
    assert scores.tolist() == [*map(float, expected)]


@pytest.mark.parametrize("continuous", [False, True])
def test_mock_subclass_may_reuse_one_array_for_its_rows(continuous) -> None:
    class Own(MockAsyncLM):
        array = np.empty(WIDTH, np.float32)

        def _get_logprobs(self, token_ids):
            self.array[:] = hashed_row(tuple(token_ids), None, WIDTH)
            return self.array

    contexts = [[1], [2], [3]]
    with Own(continuous=continuous) as lm:
        assert is_own(gathered(*map(lm.next_token_logprobs, contexts)), contexts)
        assert is_own(lm.batch_next_token_logprobs_sync(contexts), contexts)


def test_nothing_is_kept_for_a_cancelled_caller() -> None:
    call = Call([1, 2], concurrent.futures.Future(), list)
    call.give(0, torch.zeros(3, WIDTH)[1])
    call.future.cancel()
    keep_own([(call, 0)])
    assert call.results == [None, None]


def test_without_memory_for_the_cache_callers_get_their_rows(monkeypatch, capsys) -> None:
    def no_memory(rows: object) -> object:
        raise RuntimeError("can't allocate memory")

    with AsyncLM(lambda: Engine(WIDTH), backend="mine") as lm:
        with monkeypatch.context() as patched:
            patched.setattr(cache, "copies_of", no_memory)
            rows, _ = rows_of(lm, 3, [7])
        assert [int(row.argmax()) for row in rows] == [0, 1, 2]
        assert "rows_not_kept" in capsys.readouterr().out
        for hits in (0, 3):
            rows_of(lm, 3, [7])
            assert lm.stats.cache_hits == hits
