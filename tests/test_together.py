"""``then``: a function of rows runs once a step for all callers, and each gets its own result."""

from __future__ import annotations

import asyncio
import itertools
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch

from genlm.conformance.driver import started
from genlm.core import (
    Answer,
    AsyncLM,
    EngineDeadError,
    EngineError,
    InvalidInputError,
    PluginError,
    Query,
    ReentrancyError,
    hookimpl,
    load_model_by_name,
    together,
)
from genlm.core.mock import ByteTokenizer

from .conftest import PATIENCE, busy, gathered
from .doubles import Plain, Processor, Reducing, row_of

pytestmark = pytest.mark.any_version

BOTH = pytest.mark.parametrize("options", [{}, {"continuous": True, "steps": 1}], ids=str)


class Ranked:
    """A function that gives the token of a given rank and its log-probability, and records its
    calls."""

    def __init__(self):
        self.calls = []
        self.threads = set()
        self.matrices = []
        self.then = together(self.function)

    def function(self, rows, ranks):
        self.calls.append(len(rows))
        self.threads.add(threading.current_thread().name)
        self.matrices.append(weakref.ref(rows))
        values, ids = rows.sort(-1, descending=True)
        every = range(len(rows))
        return [*zip(ids[every, ranks].tolist(), values[every, ranks].tolist(), strict=True)]

    @staticmethod
    def of(row, rank):
        values, ids = row.sort(descending=True)
        return int(ids[rank]), float(values[rank])


@pytest.fixture
def ranked():
    return Ranked()


@BOTH
def test_callers_of_a_step_share_one_call_and_each_gets_its_own_result(mock, ranked, options):
    lm = mock(**options)
    contexts = [[1 + at % 9, 7] for at in range(64)]
    ranks = [at % 5 for at in range(64)]
    asked = zip(contexts, ranks, strict=True)
    found = gathered(*(lm.next_token_logprobs(ids, then=ranked.then(rank)) for ids, rank in asked))
    assert ranked.calls == [64]
    assert (lm.stats.rows, lm.stats.dedup_hits) == (9, 55)
    rows = lm.batch_next_token_logprobs_sync(contexts)
    assert found == [Ranked.of(*each) for each in zip(rows, ranks, strict=True)]


def test_the_function_runs_on_the_engine_thread(mock, ranked):
    lm = mock()
    for _ in range(2):  # the second time, the row comes from the cache
        lm.next_token_logprobs_sync([1], then=ranked.then(0))
    (name,) = ranked.threads
    assert name.startswith("genlm-")


@BOTH
def test_cached_rows_join_those_that_are_computed(mock, gate, ranked, options):
    lm = mock(**options)
    lm.batch_next_token_logprobs_sync([[at] for at in range(10)])
    before = len(gate.batches)
    found = gathered(*(lm.next_token_logprobs([at], then=ranked.then(0)) for at in range(20)))
    assert ranked.calls == [20]
    assert [len(batch) for batch in gate.batches[before:]] == [10]
    assert lm.stats.cache_hits == 10
    again = gathered(*(lm.next_token_logprobs([at], then=ranked.then(0)) for at in range(20)))
    assert again == found
    assert ranked.calls == [20, 20]  # all rows are cached, so the engine is not called
    assert len(gate.batches) == before + 1


def test_callers_of_rows_and_of_several_functions_share_a_batch(mock, gate, ranked):
    lm, other = mock(), Ranked()
    asked = [lm.next_token_logprobs([1], then=ranked.then(0)), lm.next_token_logprobs([1])]
    asked += [lm.next_token_logprobs([2], then=other.then(1)), lm.next_token_logprobs([2])]
    first, row, second, second_row = gathered(*asked)
    assert gate.batches == [[(1,), (2,)]]
    assert (first, second) == (Ranked.of(row, 0), Ranked.of(second_row, 1))
    assert (ranked.calls, other.calls) == ([1], [1])


def test_a_large_step_is_done_in_parts_that_a_processor_caches(mock, ranked):
    lm = mock(cache_size=0)
    n = 2500
    found = gathered(
        *(lm.next_token_logprobs([at % 250, 3], then=ranked.then(0)) for at in range(n))
    )
    assert sum(ranked.calls) == n
    assert max(ranked.calls) * len(lm.byte_vocab) * 4 <= 1 << 20  # bytes
    assert len(ranked.calls) == 3
    rows = lm.batch_next_token_logprobs_sync([[at, 3] for at in range(250)])
    assert found == [Ranked.of(row, 0) for row in rows] * (n // 250)


@together
def shared(rows, values):
    """Writes into its rows, which are its own."""
    best = rows.argmax(-1).tolist()
    rows.zero_()
    return [*zip(best, values, strict=True)]


@BOTH
def test_writes_of_a_function_into_its_rows_change_no_other_row(mock, options):
    lm = mock(**options)
    before = mock(cache_size=0).next_token_logprobs_sync([5])
    _, row = gathered(lm.next_token_logprobs([5], then=shared("a")), lm.next_token_logprobs([5]))
    assert row.equal(before)
    assert lm.next_token_logprobs_sync([5]).equal(before)  # the cached row is unchanged
    assert lm.next_token_logprobs_sync([5], then=shared("b")) == (int(before.argmax()), "b")
    assert lm.next_token_logprobs_sync([5]).equal(before)


# --- failures -------------------------------------------------------------------------------------


@together
def inverse(rows, numbers):
    return [1 / number for number in numbers]


@BOTH
def test_exception_of_a_function_fails_only_the_callers_that_cause_it(mock, options):
    lm = mock(**options)
    numbers = [0 if at in (3, 17) else at for at in range(1, 33)]
    outcomes = gathered(
        *(lm.next_token_logprobs([at], then=inverse(number)) for at, number in enumerate(numbers))
    )
    for number, outcome in zip(numbers, outcomes, strict=True):
        assert isinstance(outcome, ZeroDivisionError) if number == 0 else outcome == 1 / number
    failed = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert len({*map(id, failed)}) == 2  # each has an error of its own
    assert lm.next_token_logprobs_sync([1], then=inverse(4)) == 0.25


def test_function_that_runs_out_of_memory_gets_fewer_rows(mock):
    sizes = []

    @together
    def greedy(rows):
        sizes.append(len(rows))
        if len(rows) > 3:
            raise torch.OutOfMemoryError("no memory for so many")
        return rows.argmax(-1).tolist()

    lm = mock()
    found = gathered(*(lm.next_token_logprobs([at], then=greedy()) for at in range(10)))
    assert found == [
        int(row.argmax()) for row in lm.batch_next_token_logprobs_sync([[at] for at in range(10)])
    ]
    assert max(sizes[1:]) < 10


def test_another_number_of_results_is_rejected_for_all_and_by_name(mock):
    calls = []

    @together
    def one(rows):
        calls.append(len(rows))
        return [1]

    lm = mock()
    outcomes = gathered(*(lm.next_token_logprobs([at], then=one()) for at in range(3)))
    assert [type(outcome) for outcome in outcomes] == [InvalidInputError] * 3
    assert "one" in str(outcomes[0])
    assert "1 results for 3 rows" in str(outcomes[0])
    assert calls == [3]  # a single call would seem right


@pytest.mark.parametrize("result", [None, 0.5, torch.tensor(0.5)], ids=repr)
def test_a_result_that_is_no_list_is_rejected_by_name(mock, result):
    forgets = together(lambda rows: result)
    (outcome,) = gathered(mock().next_token_logprobs([1], then=forgets()))
    assert isinstance(outcome, InvalidInputError)
    assert f"returned {result!r} for 1 rows; return one each" in str(outcome)


def test_an_exception_among_the_results_is_raised_by_its_caller_alone(mock):
    @together
    def some(rows, values):
        return [KeyError(value) if value > 1 else value for value in values]

    lm = mock()
    outcomes = gathered(*(lm.next_token_logprobs([at], then=some(at)) for at in range(3)))
    assert outcomes[:2] == [0, 1]
    assert isinstance(outcomes[2], KeyError)


def test_a_function_that_asks_its_own_model_is_rejected_and_another_model_answers(mock):
    lm, other = mock(), mock()
    own = together(lambda rows: [lm.next_token_logprobs_sync([9])] * len(rows))
    (refused,) = gathered(lm.next_token_logprobs([6], then=own()))
    assert isinstance(refused, ReentrancyError)
    asks = together(lambda rows: [other.next_token_logprobs_sync([9])] * len(rows))
    (row,) = gathered(lm.next_token_logprobs([6], then=asks()))
    assert row.equal(other.next_token_logprobs_sync([9]))


def test_engine_dead_error_of_a_function_fails_only_its_caller(mock):
    def dead(rows):
        raise EngineDeadError("the other one")

    lm = mock()
    outcomes = gathered(
        lm.next_token_logprobs([6], then=together(dead)()), lm.next_token_logprobs([6])
    )
    assert isinstance(outcomes[0], EngineDeadError)
    assert outcomes[1].equal(lm.next_token_logprobs_sync([6]))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
def test_a_function_that_ends_the_model_leaves_no_caller_waiting(mock, ranked, error):
    @together
    def fatal(rows):
        raise error

    lm = mock(fail_on=lambda query: query.token_ids == (5,))
    outcomes = gathered(
        lm.next_token_logprobs([6]),
        lm.next_token_logprobs([7], then=ranked.then(0)),
        lm.batch_next_token_logprobs([[8], [9]], then=[ranked.then(0), fatal()]),
        lm.batch_next_token_logprobs([[6], [9]]),
        lm.next_token_logprobs([5]),
    )
    assert all(isinstance(outcome, EngineDeadError) for outcome in outcomes[:-1])
    assert isinstance(outcomes[-1], EngineError | EngineDeadError)


class Panic(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("error", [Panic, asyncio.CancelledError])
def test_a_panic_in_a_function_fails_only_its_caller(mock, ranked, error):
    @together
    def panics(rows):
        raise error

    lm = mock()
    refused, right = gathered(
        lm.next_token_logprobs([6], then=panics()), lm.next_token_logprobs([7], then=ranked.then(0))
    )
    assert isinstance(refused, PluginError)
    assert "panics" in str(refused)
    assert isinstance(refused.__cause__, error)
    assert right == lm.next_token_logprobs_sync([7], then=ranked.then(0))


def test_then_that_together_did_not_make_is_rejected(mock, ranked):
    lm = mock()
    for wrong, remedy in (
        (together(lambda rows: rows), "call it"),
        (lambda row: row, "@together"),
        (5, "@together"),
        ("x", "@together"),
    ):
        for outcome in gathered(
            lm.next_token_logprobs([1], then=wrong),
            lm.batch_next_token_logprobs([[1]], then=wrong),
            lm.batch_next_token_logprobs([[1]], then=[wrong]),
            lm.batch_next_token_logprobs([[1], [2]], then=[ranked.then(0), wrong]),
            lm.population([1], 2).logprobs(then=wrong),
        ):
            assert isinstance(outcome, InvalidInputError)
            assert remedy in str(outcome)
        with pytest.raises(InvalidInputError, match=remedy):
            lm.next_token_logprobs_sync([1], then=wrong)
    with pytest.raises(InvalidInputError, match="got None"):
        lm.batch_next_token_logprobs_sync([[1]], then=[None])
    assert lm.next_token_logprobs_sync([1], then=ranked.then(0)) is not None


@pytest.mark.parametrize("given", [3, asyncio.sleep, "draw"])
def test_together_rejects_other_values_than_plain_functions(given):
    with pytest.raises(InvalidInputError, match="plain function"):
        together(given)


async def test_a_function_that_blocks_holds_its_model_and_no_event_loop(mock):
    begun, go = threading.Event(), threading.Event()

    @together
    def slow(rows):
        begun.set()
        return [go.wait(PATIENCE)] * len(rows)

    lm = mock()
    asked = asyncio.ensure_future(lm.next_token_logprobs([1], then=slow()))
    await asyncio.to_thread(begun.wait, PATIENCE)
    (other,) = await started(lm.next_token_logprobs([2]))
    go.set()  # set by this event loop, which continues meanwhile
    assert await asked
    assert (await other).shape == (258,)


async def test_cancelled_caller_does_not_affect_others(mock, gate, ranked):
    lm = mock()
    first = await busy(lm, gate, [0])
    asked = [
        asyncio.ensure_future(lm.next_token_logprobs([at], then=ranked.then(0)))
        for at in range(1, 5)
    ]
    await asyncio.sleep(0)
    asked[1].cancel()
    gate.open()
    outcomes = await asyncio.gather(first, *asked, return_exceptions=True)
    assert isinstance(outcomes[2], asyncio.CancelledError)
    assert ranked.calls == [3]
    assert [outcomes[at] for at in (1, 3, 4)] == [Ranked.of(row_of(at), 0) for at in (1, 3, 4)]


# --- what results keep ----------------------------------------------------------------------------


class Pair(NamedTuple):
    best: torch.Tensor
    name: str


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: rows,
        lambda rows: [row[:7] for row in rows],
        lambda rows: [(1, [row]) for row in rows],
        lambda rows: [{"row": row[3]} for row in rows],
        lambda rows: [Pair(row[-1], "last") for row in rows],
        lambda rows: rows.argmax(-1),
    ],
)
def test_a_result_that_is_a_view_keeps_no_other_alive(mock, make):
    def tensors(result):
        if isinstance(result, torch.Tensor):
            return [result]
        parts = result.values() if isinstance(result, dict) else result
        nested = [tensors(part) for part in parts if isinstance(part, (torch.Tensor, list, dict))]
        return [*itertools.chain(*nested)]

    lm, seen = mock(), []

    @together
    def views(rows):
        seen.append(rows.clone())
        return make(rows)

    results = gathered(*(lm.next_token_logprobs([at], then=views()) for at in range(8)))
    kept = [each for result in results for each in tensors(result)]
    assert len(kept) == 8
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in kept)
    wanted = [each for result in make(seen[0]) for each in tensors(result)]
    assert all(map(torch.equal, kept, wanted))
    assert [*map(type, results)] == [*map(type, make(seen[0]))]


def test_matrix_is_freed_after_its_step_even_if_the_function_raises(mock, ranked):
    lm = mock()
    gathered(*(lm.next_token_logprobs([at], then=ranked.then(0)) for at in range(8)))
    errors = gathered(*(lm.next_token_logprobs([at], then=ranked.then(999)) for at in range(2)))
    assert [type(error) for error in errors] == [IndexError] * 2
    assert len(ranked.matrices) == 1 + 3
    assert [kept() is None for kept in ranked.matrices] == [True] * 4


# --- everything that rows have --------------------------------------------------------------------


@BOTH
def test_function_gets_rows_of_the_adapter(mock, ranked, options):
    lm = mock(**options)
    lm.add_new_lora("folder/of/poems", "poems")
    names = [None, "poems"]
    found = gathered(*(lm.next_token_logprobs([3], name, then=ranked.then(0)) for name in names))
    rows = [lm.next_token_logprobs_sync([3], name) for name in names]
    assert found == [Ranked.of(row, 0) for row in rows]
    assert found[0] != found[1]
    assert ranked.calls == [2]


@BOTH
def test_function_gets_rows_changed_by_wrappers(mock, ranked, options):
    def no_best(queries, rows):
        return rows.scatter(1, rows.argmax(-1, keepdim=True), -torch.inf).log_softmax(-1)

    plain, lm = mock(**options), mock(wrappers=[Processor(no_best)], **options)
    token_id, _ = lm.next_token_logprobs_sync([3], then=ranked.then(0))
    assert token_id == Ranked.of(plain.next_token_logprobs_sync([3]), 1)[0]


def test_two_programs_in_two_loops_each_get_their_own(mock, ranked):
    lm = mock()

    def program(first):
        return gathered(
            *(lm.next_token_logprobs([first, at], then=ranked.then(at)) for at in range(4))
        )

    with ThreadPoolExecutor(2) as pool:
        found = [*pool.map(program, (1, 2))]
    assert found == [[Ranked.of(row_of(first, at), at) for at in range(4)] for first in (1, 2)]
    assert sum(ranked.calls) == 8


def test_the_result_of_an_error_of_the_engine_is_that_error(mock, ranked):
    lm = mock(fail_on=lambda query: query.token_ids == (3,))
    outcomes = gathered(*(lm.next_token_logprobs([at], then=ranked.then(0)) for at in range(6)))
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [at == 3 for at in range(6)]
    assert sum(ranked.calls) == 5


# --- many contexts in one call --------------------------------------------------------------------


@BOTH
def test_batch_call_takes_one_function_for_all_or_one_for_each(mock, ranked, options):
    lm = mock(**options)
    contexts = [[at, at] for at in range(6)]
    rows = [*lm.batch_next_token_logprobs_sync(contexts)]

    async def asked(**options):
        return await lm.batch_next_token_logprobs(contexts, **options)

    same = asyncio.run(asked(then=ranked.then(2)))
    assert same == [Ranked.of(row, 2) for row in rows]
    each = asyncio.run(asked(then=map(ranked.then, range(6))))
    assert each == [Ranked.of(row, rank) for rank, row in enumerate(rows)]
    assert lm.batch_next_token_logprobs_sync(contexts, then=map(ranked.then, range(6))) == each
    assert ranked.calls == [6, 6, 6]
    assert lm.batch_next_token_logprobs_sync([], then=ranked.then(0)) == []


@BOTH
def test_a_batch_call_shares_calls_of_a_function_with_other_callers(mock, ranked, options):
    lm = mock(**options)
    batch, one, row = gathered(
        lm.batch_next_token_logprobs([[1], [2], [1]], then=map(ranked.then, range(3))),
        lm.next_token_logprobs([3], then=ranked.then(0)),
        lm.next_token_logprobs([2]),
    )
    assert ranked.calls == [4]
    assert batch == [Ranked.of(row_of(1), 0), Ranked.of(row, 1), Ranked.of(row_of(1), 2)]
    assert one == Ranked.of(row_of(3), 0)


def test_batch_call_with_a_wrong_number_of_functions_is_rejected(mock, gate, ranked):
    lm = mock()
    with pytest.raises(InvalidInputError, match="then has 3 elements for 2 contexts"):
        lm.batch_next_token_logprobs_sync([[1], [2]], then=[ranked.then(0)] * 3)
    assert gate.batches == []


def test_the_first_error_ends_a_batch_call(mock):
    lm = mock()
    with pytest.raises(ZeroDivisionError):
        lm.batch_next_token_logprobs_sync([[1], [2]], then=map(inverse, (1, 0)))


@BOTH
def test_batch_call_may_return_exceptions_as_results(mock, options):
    lm = mock(fail_on=lambda query: query.token_ids == (3,), **options)
    contexts, numbers = [[at] for at in range(6)], [2, 0, 4, 1, 5, 0]
    found = lm.batch_next_token_logprobs_sync(
        contexts, then=map(inverse, numbers), return_exceptions=True
    )
    kinds = [float, ZeroDivisionError, float, EngineError, float, ZeroDivisionError]
    assert [*map(type, found)] == kinds
    assert [found[at] for at in (0, 2, 4)] == [0.5, 0.25, 0.2]
    (alone,) = lm.batch_next_token_logprobs_sync([[3]], then=inverse(1), return_exceptions=True)
    assert isinstance(alone, EngineError)


def test_return_exceptions_requires_then(mock):
    lm = mock()
    with pytest.raises(InvalidInputError, match="return_exceptions goes with then"):
        lm.batch_next_token_logprobs_sync([[1]], return_exceptions=True)
    with pytest.raises(InvalidInputError, match="return_exceptions goes with then"):
        asyncio.run(lm.batch_next_token_logprobs([[1]], return_exceptions=True))


class OneAtATime:
    """An engine that answers one context in a step, and knows which rows' memory is kept."""

    tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

    def __init__(self):
        self.waiting: list[Query] = []
        self.kept = []
        self.most = 0

    @hookimpl
    def genlm_step(self, queries):
        self.most = max(self.most, sum(kept() is not None for kept in self.kept))
        self.waiting += queries
        query = self.waiting.pop(0)
        rows = row_of(*query.token_ids).repeat(2, 1)
        self.kept.append(weakref.ref(rows))
        return [Answer(query, rows[0])]


def test_a_batch_call_that_takes_many_steps_keeps_results_and_no_rows(ranked):
    engine = OneAtATime()
    with AsyncLM(lambda: engine, backend="mine", cache_size=0) as lm:
        found = lm.batch_next_token_logprobs_sync([[at] for at in range(5)], then=ranked.then(0))
    assert found == [Ranked.of(row_of(at), 0) for at in range(5)]
    assert ranked.calls == [1] * 5
    assert engine.most == 0


def test_engine_with_rows_only_supports_together(ranked):
    with AsyncLM(Plain, backend="plain") as lm:
        assert lm.next_token_logprobs_sync([4], then=ranked.then(1)) == Ranked.of(row_of(4), 1)


def test_together_keeps_the_name_and_docstring_of_the_function():
    assert (shared.__name__, shared.__doc__) == (
        "shared",
        "Writes into its rows, which are its own.",
    )
    assert repr(shared) == "<together shared>"


def test_the_same_object_serves_several_models(ranked):
    with load_model_by_name("mock", "mock") as one, load_model_by_name("mock", "mock") as other:
        results = [lm.next_token_logprobs_sync([4], then=ranked.then(0)) for lm in (one, other)]
    assert results[0] == results[1]


# --- engines that apply the functions themselves --------------------------------------------------


@pytest.fixture
def reducing(gate):
    with AsyncLM(lambda: Reducing(on_batch=gate), backend="reducing", check=True) as lm:
        yield lm


def test_engine_that_takes_reductions_sends_no_rows(reducing, ranked):
    contexts = [[at % 7, 1] for at in range(30)]
    ranks = [at % 5 for at in range(30)]
    found = reducing.batch_next_token_logprobs_sync(contexts, then=map(ranked.then, ranks))
    assert found == [
        Ranked.of(row_of(*ids), rank) for ids, rank in zip(contexts, ranks, strict=True)
    ]
    assert (reducing.stats.rows, reducing.stats.reductions, ranked.calls) == (0, 30, [30])
    assert reducing.next_token_logprobs_sync([4], then=ranked.then(1)) == Ranked.of(row_of(4), 1)
    (one,) = gathered(reducing.next_token_logprobs([4], then=ranked.then(1)))
    assert one == Ranked.of(row_of(4), 1)


def test_reducing_engine_passes_on_the_functions_exception(reducing):
    numbers = [2, 0, 4]
    outcomes = gathered(
        *(reducing.next_token_logprobs([at], then=inverse(n)) for at, n in enumerate(numbers))
    )
    assert [outcomes[0], outcomes[2]] == [0.5, 0.25]
    assert isinstance(outcomes[1], ZeroDivisionError)
    nothing = together(lambda rows: [None] * len(rows))
    assert reducing.next_token_logprobs_sync([1], then=nothing()) is None


def test_reducing_engine_may_return_exceptions_as_results(reducing):
    found = reducing.batch_next_token_logprobs_sync(
        [[1], [2], [3]], then=map(inverse, (2, 0, 4)), return_exceptions=True
    )
    assert [*map(type, found)] == [float, ZeroDivisionError, float]


def test_failing_reducing_engine_is_named_and_others_are_answered(ranked):
    fails = {"fail_on": lambda query: query.token_ids == (3,)}
    with AsyncLM(lambda: Reducing(**fails), backend="reducing") as lm:
        outcomes = gathered(*(lm.next_token_logprobs([at], then=ranked.then(0)) for at in range(6)))
    assert isinstance(outcomes[3], EngineError)
    assert "reducing" in str(outcomes[3])
    assert outcomes[4] == Ranked.of(row_of(4), 0)


async def test_reducing_engine_drops_a_cancelled_caller(reducing, gate, ranked):
    first = await busy(reducing, gate, [0])
    leaves, stays = await started(
        reducing.next_token_logprobs([1], then=ranked.then(0)),
        reducing.next_token_logprobs([1], then=ranked.then(1)),
    )
    leaves.cancel()
    gate.open()
    assert await stays == Ranked.of(row_of(1), 1)
    await first
    assert sum(ranked.calls) == 1


def test_with_a_wrapper_reductions_are_computed_from_changed_rows(ranked):
    def no_best(queries, rows):
        return rows.scatter(1, rows.argmax(-1, keepdim=True), -torch.inf).log_softmax(-1)

    with AsyncLM(Reducing, backend="reducing", wrappers=[Processor(no_best)]) as lm:
        token_id, _ = lm.next_token_logprobs_sync([3], then=ranked.then(0))
        assert (lm.stats.rows, lm.stats.reductions) == (1, 0)
    assert token_id == Ranked.of(row_of(3), 1)[0]
