"""What wrappers may do: change rows, by one hook, and observe all others."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest
import structlog
import torch

from genlm.core import (
    Answer,
    AsyncLM,
    BackendImportError,
    EngineError,
    PluginError,
    Query,
    hookimpl,
    load_model_by_name,
)
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine, hashed_row

from .conftest import gathered

ENGINES = [MockEngine, ContinuousMockEngine]


def opened(engine, *wrappers, **options):
    """A model of an engine, or of a class of engines."""
    load = (lambda: engine(ByteTokenizer())) if isinstance(engine, type) else lambda: engine
    return AsyncLM(load, backend="mock", wrappers=wrappers, **options)


class Processor:
    """Changes rows by a function."""

    def __init__(self, change):
        self.change = change

    @hookimpl
    def genlm_process_logprobs(self, queries, rows):
        return self.change(queries, rows)


# --- which they are -------------------------------------------------------------------------------


class Equal(Processor):
    """Equal to every other, and of no hash."""

    def __eq__(self, other):
        return isinstance(other, Equal)


def test_wrappers_and_engines_are_told_apart_by_identity():
    class Unhashed(MockEngine):
        __hash__ = None

        def __eq__(self, other):
            return True

    def squared(queries, rows):
        return (2 * rows).log_softmax(-1)

    with opened(MockEngine) as lm:
        expected = (4 * lm.next_token_logprobs_sync([1])).log_softmax(-1)
    once = Equal(squared)
    for given in ((Equal(squared), Equal(squared)), (once, once)):
        with opened(Unhashed, *given) as lm:
            torch.testing.assert_close(lm.next_token_logprobs_sync([1]), expected)
    engine = Unhashed(ByteTokenizer())
    released = weakref.ref(engine)
    lm = opened(engine)
    lm.close()
    del engine
    gc.collect()
    assert released() is None


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("genlm_process_logprob", "rows", "did you mean genlm_process_logprobs"),
        ("genlm_process_logprobs", "query, rows", "no argument query; it may take queries, rows"),
    ],
)
def test_a_misspelt_hook_is_told_by_the_name_of_its_class(name, arguments, message):
    made = {}
    exec(f"def {name}(self, {arguments}): return rows", made)
    misspelt = type("Misspelt", (), {name: hookimpl(made[name])})
    with pytest.raises(PluginError, match=rf"^wrapper .*Misspelt: .*{message}"):
        opened(MockEngine, misspelt())


# --- changing rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["inference", "expanded", "kept"])
def test_what_a_processor_returns_may_be_written_into_by_the_next(how):
    table = torch.randn(1, 258).log_softmax(-1)

    def given(queries, rows):
        if how == "kept":
            return table
        if how == "expanded":
            return torch.full((1, 1), 1 / 258).log().expand(rows.shape)
        with torch.inference_mode():
            return (2 * rows).log_softmax(-1)

    def masked(queries, rows):
        rows[:, 0] -= 1.0
        rows -= rows.logsumexp(-1, keepdim=True)
        return rows

    kept = table.clone()
    with opened(MockEngine, Processor(given), Processor(masked), cache_size=0) as lm:
        first, again = (lm.next_token_logprobs_sync([2]) for _ in range(2))
    assert first.equal(again)
    assert table.equal(kept)


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("observes", [False, True])
@pytest.mark.parametrize(
    ("raised", "said"), [(asyncio.CancelledError, "cancelled"), (PanicException, "PanicException")]
)
def test_what_is_no_exception_fails_its_request_alone(engine, observes, raised, said):
    """Such as a task that is cancelled inside a hook."""

    def cancelled(queries, rows):
        if queries[0].token_ids == (2,):
            raise raised
        return rows

    class Observer:
        @hookimpl(wrapper=True)
        def genlm_process_logprobs(self, queries, rows):
            yield
            cancelled(queries, rows)

    same = Processor(lambda queries, rows: rows)
    with opened(engine, *((same, Observer()) if observes else (Processor(cancelled),))) as lm:
        for _ in range(2):
            with pytest.raises(PluginError, match=said):
                lm.next_token_logprobs_sync([2])
            assert len(lm.next_token_logprobs_sync([1])) == 258


@pytest.mark.parametrize("engine", ENGINES)
def test_a_processor_is_called_once_for_what_a_batch_or_step_finished(engine):
    """Its rows are as wide as the vocabulary, and not as the engine."""
    calls = []

    class Padded(engine):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.vocab_size = 320

    def change(queries, rows):
        calls.append(([query.token_ids for query in queries], tuple(rows.shape)))
        rows[:, 5] = -float("inf")  # it may write into them
        return rows.log_softmax(-1)

    with opened(Padded, Processor(change)) as lm:
        lm.batch_next_token_logprobs_sync([[1], [2], [3]])
        row = lm.next_token_logprobs_uncached([4])
    assert calls == [([(1,), (2,), (3,)], (3, 258)), ([(4,)], (1, 258))]
    assert row.shape == (258,)
    assert abs(row.logsumexp(0)) < 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_a_row_whose_mass_is_all_on_tokens_that_the_model_lacks_has_none(engine):
    class Narrow(engine):
        def __init__(self, tokenizer):
            super().__init__(tokenizer)
            self.vocab_size = 200

        def row(self, query):
            return super().row(query)[:200].log_softmax(-1)

    def beyond(queries, rows):
        rows[:, :200] = -float("inf")
        rows[:, 200] = 0.0
        return rows

    with opened(Narrow, Processor(beyond)) as lm:
        assert lm.next_token_logprobs_sync([1]).eq(-float("inf")).all()
        with pytest.raises(EngineError, match="no mass"):
            lm.sample_sync([1], 3, [])


@pytest.mark.parametrize("engine", ENGINES)
def test_several_apply_in_the_order_given(engine):
    order = []

    def named(name, **marks):
        class Processor:
            @hookimpl(**marks)
            def genlm_process_logprobs(self, rows):
                order.append(name)
                return rows

        return Processor()

    given = [named("b"), named("last", trylast=True), named("c"), named("first", tryfirst=True)]
    with opened(engine, *given) as lm:
        lm.next_token_logprobs_sync([1])
    assert order == ["first", "b", "c", "last"]


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_processor_raises_names_it_and_concerns_one_request_alone(engine):
    def choose(queries, rows):
        if any(query.token_ids[0] == 2 for query in queries):
            raise KeyError("no rule for this context")
        return rows

    asked = []
    made = engine(ByteTokenizer(), on_batch=lambda queries: asked.append(len(queries)))
    with opened(made, Processor(choose)) as lm:
        rows = gathered(*(lm.next_token_logprobs([i]) for i in range(4)))
        calls = len(asked)
        assert [type(row) for row in rows] == [torch.Tensor] * 2 + [PluginError] + [torch.Tensor]
        for word in ("Processor", "genlm_process_logprobs", "no rule for this context"):
            assert word in str(rows[2])
        assert isinstance(rows[2].__cause__, KeyError)
        assert torch.equal(lm.next_token_logprobs_sync([3]), rows[3])
        assert len(asked) == calls, "the rows of the others are kept"
        assert calls == (1 if engine is MockEngine else 2), "the engine was asked again"


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        (lambda _, rows: None, "NoneType, not a tensor"),
        (lambda _, rows: rows[:, 1:], r"shape \(1, 257\)"),
        (lambda _, rows: rows.double(), r".*torch.float64, .*\(\.float\(\) converts\)"),
        (lambda _, rows: rows.to("meta"), "a .* tensor on meta; give a dense one"),
        (lambda _, rows: rows.to_sparse(), "a torch.sparse_coo tensor on cpu; give a dense one"),
        (lambda _, rows: rows.requires_grad_(), ".*requires_grad=True"),
    ],
)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_processor_must_not_return(engine, returned, wrong):
    with (
        opened(engine, Processor(returned)) as lm,
        pytest.raises(PluginError, match=f"Processor: genlm_process_logprobs returned {wrong}"),
    ):
        lm.next_token_logprobs_sync([1])


def test_a_wrapper_that_gives_its_own_plugin_error_is_quoted_as_it_is():
    def refuse(queries, rows):
        raise PluginError("a grammar has no end; give it one")

    with (
        opened(MockEngine, Processor(refuse)) as lm,
        pytest.raises(PluginError, match=r"^a grammar has no end; give it one$"),
    ):
        lm.next_token_logprobs_sync([1])


def test_an_iterator_that_ends_in_a_processor_is_named():
    temperatures = iter([2.0])
    processor = Processor(lambda _, rows: (rows / next(temperatures)).log_softmax(-1))
    with opened(MockEngine, processor) as lm:
        lm.next_token_logprobs_sync([1])
        with pytest.raises(PluginError, match="genlm_process_logprobs raised StopIteration"):
            lm.next_token_logprobs_sync([2])


@pytest.mark.parametrize("engine", ENGINES)
def test_the_check_looks_at_processed_rows(engine):
    with (
        opened(engine, Processor(lambda _, rows: 2 * rows), check=True) as lm,
        pytest.raises(PluginError, match=r"a wrapper's genlm_process_logprobs .* normalise"),
    ):
        lm.next_token_logprobs_sync([1])


def test_a_processor_may_ask_another_model():
    def product(queries, rows):
        others = other.batch_next_token_logprobs_sync([q.token_ids for q in queries])
        return (rows + others).log_softmax(-1)

    with opened(MockEngine) as other, opened(ContinuousMockEngine, Processor(product)) as lm:
        row = hashed_row([1], None, 258)
        assert torch.allclose(lm.next_token_logprobs_sync([1]), (2 * row).log_softmax(-1))


def test_an_installed_processor_comes_before_those_given(install):
    install(
        "silencer",
        """
        from genlm.core import hookimpl

        class Silencer:
            @hookimpl
            def genlm_process_logprobs(self, rows):
                rows[:, 9] = -float("inf")
                return rows.log_softmax(-1)
        """,
        group="genlm.wrappers",
        target="plugin_silencer:Silencer",
    )
    seen = []

    def watch(queries, rows):
        seen.append(float(rows[0, 9]))
        return rows

    with load_model_by_name("mock", backend="mock", wrappers=[Processor(watch)]) as lm:
        assert lm.next_token_logprobs_sync([1])[9] == -float("inf")
    assert seen == [-float("inf")]


def test_an_installed_wrapper_that_cannot_be_made_is_named(install):
    source = """
        class Demanding:
            def __init__(self):
                raise RuntimeError("no configuration")
    """
    install("demanding", source, group="genlm.wrappers", target="plugin_demanding:Demanding")
    with pytest.raises(
        BackendImportError,
        match=r"wrapper 'demanding' is installed \(demanding 1\.2\).*no configuration",
    ):
        load_model_by_name("mock", backend="mock")


# --- refused at load ------------------------------------------------------------------------------


def around(*hooks):
    """An object that observes these hooks."""

    def observe(self):
        yield

    return type("Observer", (), {hook: hookimpl(wrapper=True)(observe) for hook in hooks})()


ROWS, STEP = "genlm_next_token_logprobs", "genlm_step"


@pytest.mark.parametrize(
    ("engine", "others", "hooks", "remedy"),
    [
        (ContinuousMockEngine, [], [ROWS], STEP),
        (ContinuousMockEngine, [], [ROWS, "genlm_sample"], STEP),
        (ContinuousMockEngine, [], [ROWS, "genlm_add_lora"], STEP),
        (MockEngine, [], [STEP], ROWS),
        (MockEngine, [Processor(None)], ["genlm_sample"], ROWS),
        (MockEngine, [], ["genlm_process_logprobs"], ROWS),
    ],
)
def test_an_observer_that_is_never_called_is_refused(engine, others, hooks, remedy):
    with pytest.raises(PluginError) as refused:
        opened(engine, *others, around(*hooks))
    said = str(refused.value)
    assert "Observer" in said
    assert f"let it go around {remedy}" in said
    assert "genlm_process_logprobs" in said


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("hooks", [[ROWS, STEP], ["genlm_add_lora"], ["genlm_close"]])
def test_an_observer_that_is_called_is_accepted(engine, hooks):
    opened(engine, around(*hooks)).close()


class Unmarked:
    def genlm_process_logprobs(self, rows):
        return rows


class Shadow:
    @hookimpl
    def genlm_close(self): ...


class Yieldless:
    @hookimpl(wrapper=True)
    def genlm_close(self): ...


class Async:
    @hookimpl
    async def genlm_process_logprobs(self, rows):
        return rows


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (object(), r"wrapper builtins.object has no hook; mark its methods"),
        (Unmarked(), "Unmarked: genlm_process_logprobs is not marked"),
        (Shadow(), "would shadow"),
        (Yieldless(), "wrapper .*Yieldless: genlm_close is a wrapper without a yield; write"),
        (Unmarked.genlm_process_logprobs, "Unmarked.genlm_process_logprobs is a function; make it"),
        (Async(), "wrapper .*Async: genlm_process_logprobs is async; hooks are plain"),
    ],
)
def test_what_is_no_wrapper_is_refused(wrapper, said):
    with pytest.raises(PluginError, match=said):
        opened(MockEngine, wrapper)


# --- observing ------------------------------------------------------------------------------------


class Both:
    """Goes around batches and steps."""

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(self):
        return (yield from self.observe())

    @hookimpl(wrapper=True)
    def genlm_step(self):
        return (yield from self.observe())


class Interfering(Both):
    """Does not only observe: once."""

    def __init__(self, how):
        self.how = how
        self.done = False
        self.calls = 0

    def observe(self):
        self.calls += 1
        result = yield
        if self.done or not len(result):
            return result
        self.done = True
        return self.how(result)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "how",
    [
        lambda result: result[1:],
        lambda result: [*result, *result],
        lambda result: [Answer(Query((1,)), torch.zeros(258)) for _ in result],
        lambda result: isinstance(result, list) and result.pop(0),
        lambda result: {Query((9,)): OSError("of no request"), Query((1,)): "no error"},
        lambda result: 5,
        lambda result: None,
    ],
)
def test_what_else_an_observer_returns_is_ignored(engine, how):
    wrapper = Interfering(how)
    with opened(engine, wrapper, check=True) as lm, opened(engine) as sound:
        contexts = [[1], [2], [3]]
        rows = gathered(*map(lm.next_token_logprobs, contexts))
        for row, context in zip(rows, contexts, strict=True):
            assert torch.equal(row, sound.next_token_logprobs_sync(context))
        assert wrapper.done


@pytest.mark.parametrize("engine", ENGINES)
def test_what_a_hook_takes_out_of_its_queries_is_not_lost(engine):
    class Pops:
        @hookimpl(wrapper=True)
        def genlm_next_token_logprobs(self, queries):
            yield queries.pop(0)

        @hookimpl(wrapper=True)
        def genlm_step(self, queries):
            yield queries.sort()

    with opened(engine, Pops()) as lm:
        for _ in range(2):
            with pytest.raises(PluginError, match=r"Pops: .* 'tuple' object has no attribute"):
                lm.batch_next_token_logprobs_sync([[1], [2]])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_observer_that_turns_a_draw_round_is_named(engine):
    class Reverses:
        @hookimpl(wrapper=True)
        def genlm_sample(self):
            (yield)[0].reverse()

        @hookimpl(wrapper=True)
        def genlm_step(self):
            for answer in (yield):
                answer.result.reverse()

    with (
        opened(engine, Reverses()) as lm,
        pytest.raises(PluginError, match=r"Reverses: genlm_\w+ wrote into what the engine gave"),
    ):
        lm.sample_sync([1], 4, [], seed=1)


@pytest.mark.parametrize("engine", ENGINES)
def test_an_observer_that_writes_into_rows_changes_none_in_silence(engine):
    def spoil(result):
        row = result[0]
        getattr(row, "result", row).zero_()

    with opened(engine, Interfering(spoil)) as lm, opened(engine) as sound:
        with pytest.raises(PluginError, match=r"Interfering: genlm_\w+ wrote into what the engine"):
            lm.next_token_logprobs_sync([1])
        again = lm.next_token_logprobs_sync([1])
        assert torch.equal(again, sound.next_token_logprobs_sync([1]))


def test_answers_may_come_from_a_generator():
    class Lazy(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            yield from self.advance(queries)

    with opened(Lazy, around(ROWS, STEP), check=True) as lm:
        assert torch.equal(lm.next_token_logprobs_sync([1]), hashed_row([1], None, 258))


class Refusing:
    """Names requests to fail: draws when they come, rows when they are there."""

    def failing(self, requests):
        return {
            request: OSError("not today")
            for request in requests
            if getattr(request, "token_ids", (2,)) == (2,)
        }

    @hookimpl(wrapper=True)
    def genlm_next_token_logprobs(self, queries):
        yield
        return self.failing(queries)

    @hookimpl(wrapper=True)
    def genlm_sample(self, queries):
        yield
        return self.failing(queries)

    @hookimpl(wrapper=True)
    def genlm_process_logprobs(self, queries):
        yield
        return self.failing(queries)

    @hookimpl(wrapper=True)
    def genlm_step(self, samples):
        answers = yield
        return self.failing([*samples, *(answer.request for answer in answers)])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("others", [[], [Processor(lambda queries, rows: rows)]])
def test_a_wrapper_may_fail_requests_by_name(engine, others):
    with opened(engine, *others, Refusing()) as lm, opened(engine) as sound:
        row, refused, draw = gathered(
            lm.next_token_logprobs([1]), lm.next_token_logprobs([2]), lm.sample([2], 2, [], seed=1)
        )
        assert torch.equal(row, sound.next_token_logprobs_sync([1]))
        for error in (refused, draw):
            assert isinstance(error, PluginError)
            assert "Refusing: genlm_" in str(error)
            assert "OSError: not today" in str(error)
            assert isinstance(error.__cause__, OSError)
        assert lm.stats.failed_calls == 0, "the engine was not asked again"


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", [True, False])
def test_what_a_wrapper_raises_names_it_and_the_engine_goes_on(engine, before):
    class Broken(Both):
        left = 1

        def observe(self):
            if before:
                self.perhaps_raise()
            result = yield
            if not before and len(result):
                self.perhaps_raise()
            return result

        def perhaps_raise(self):
            if self.left:
                self.left -= 1
                raise RuntimeError("the wrapper's own bug")

    def answers(lm):
        return gathered(lm.next_token_logprobs([1]), lm.sample([3], 3, [], seed=1))

    with opened(engine, Broken()) as lm, opened(engine) as sound:
        met = [answer for answer in answers(lm) if isinstance(answer, Exception)]
        assert met
        for error in met:
            assert isinstance(error, PluginError)
            assert "Broken" in str(error)
            assert "the wrapper's own bug" in str(error)
            assert "backend" not in str(error)
        for answer, right in zip(answers(lm), answers(sound), strict=True):
            assert list(answer) == list(right)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_wrapper_that_yields_twice_is_named_and_ended(engine):
    ended = []

    class Twice(Both):
        def observe(self):
            result = yield
            try:
                yield
            finally:
                ended.append(result)

    with opened(engine, Twice()) as lm:
        (error,) = gathered(lm.next_token_logprobs([1]))
        assert isinstance(error, PluginError)
        assert "Twice" in str(error)
        assert "yields a second time" in str(error)
    assert ended


@pytest.mark.parametrize("engine", ENGINES)
def test_the_engines_error_stays_the_one_to_report(engine):
    seen = []

    class Swallowing(Both):
        def observe(self):
            try:
                return (yield)
            except Exception as error:
                seen.append(error)
                raise ValueError("another") from error

    failing = engine(ByteTokenizer(), fail_on=lambda query: query.token_ids == (2,))
    with structlog.testing.capture_logs() as logs, opened(failing, Swallowing()) as lm:
        row, failed = gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
    assert isinstance(row, torch.Tensor)
    assert isinstance(failed, EngineError)
    assert "told to fail" in str(failed)
    assert seen
    assert any("another" in log.get("error", "") for log in logs)


@pytest.mark.parametrize("engine", ENGINES)
def test_failed_calls_are_counted_and_the_first_one_is_said(engine):
    failing = engine(ByteTokenizer(), fail_on=lambda query: query.token_ids == (2,))
    with structlog.testing.capture_logs() as logs, opened(failing) as lm:
        gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
        assert lm.stats.failed_calls == 2  # both together, and the one alone
    said = [log for log in logs if log["event"] == "engine.call_failed"]
    assert [log["log_level"] for log in said] == ["warning"]


def test_draws_and_scores_are_counted():
    with opened(ContinuousMockEngine) as lm:
        gathered(*(lm.sequence_logprobs([i], [1, 2]) for i in range(5)), lm.sample([9], 2, []))
        assert (lm.stats.scores, lm.stats.draws, lm.stats.rows) == (5, 1, 0)
