"""What wrappers may do: change rows, by one hook, and observe all others."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque

import pytest
import structlog
import torch

from genlm.core import (
    AsyncLM,
    BackendImportError,
    EngineError,
    PluginError,
    Query,
    hookimpl,
    load_model_by_name,
)
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine

from .conftest import gathered
from .doubles import Processor, padded, row_of

engines = pytest.mark.parametrize("engine", [MockEngine, ContinuousMockEngine])


def opened(engine, *wrappers, **options):
    """A model of an engine, or of a class of engines."""
    load = (lambda: engine(ByteTokenizer())) if isinstance(engine, type) else lambda: engine
    return AsyncLM(load, backend="mock", wrappers=wrappers, **options)


def failing(engine):
    """An engine that fails on one context."""
    return engine(ByteTokenizer(), fail_on=lambda query: query.token_ids == (2,))


def same(queries, rows):
    return rows


# --- changing rows --------------------------------------------------------------------------------


@dataclasses.dataclass
class Power:
    """Equal to any other of the same number, and of no hash."""

    power: float

    @hookimpl
    def genlm_process_logprobs(self, rows):
        return (self.power * rows).log_softmax(-1)


def test_wrappers_are_told_apart_by_identity():
    expected = (4 * row_of(1)).log_softmax(-1)
    once = Power(2)
    for given in ((Power(2), Power(2)), (once, once)):
        with opened(MockEngine, *given) as lm:
            torch.testing.assert_close(lm.next_token_logprobs_sync([1]), expected)


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


@engines
def test_a_processor_is_called_once_for_what_a_batch_or_step_finished(engine):
    """Its rows are as wide as the vocabulary, and not as the engine."""
    calls = []

    def change(queries, rows):
        calls.append(([query.token_ids for query in queries], tuple(rows.shape)))
        rows[:, 5] = -float("inf")  # it may write into them
        return rows.log_softmax(-1)

    with opened(padded(engine, 320), Processor(change)) as lm:
        lm.batch_next_token_logprobs_sync([[1], [2], [3]])
        row = lm.next_token_logprobs_uncached([4])
    assert calls == [([(1,), (2,), (3,)], (3, 258)), ([(4,)], (1, 258))]
    assert abs(row.logsumexp(0)) < 1e-5


def test_a_row_whose_mass_is_all_on_tokens_that_the_model_lacks_has_none():
    class Narrow(MockEngine):
        def row(self, query):
            return super().row(query)[:200].log_softmax(-1)

    def beyond(queries, rows):
        rows[:, :200] = -float("inf")
        rows[:, 200] = 0.0
        return rows

    with opened(padded(Narrow, 200), Processor(beyond)) as lm:
        assert lm.next_token_logprobs_sync([1]).eq(-float("inf")).all()
        with pytest.raises(EngineError, match="no mass"):
            lm.sample_sync([1], 3, [])


def test_several_apply_in_the_order_given():
    order = []

    def named(name, **marks):
        class Named:
            @hookimpl(**marks)
            def genlm_process_logprobs(self, rows):
                order.append(name)
                return rows

        return Named()

    given = [named("b"), named("last", trylast=True), named("c"), named("first", tryfirst=True)]
    with opened(MockEngine, *given) as lm:
        lm.next_token_logprobs_sync([1])
    assert order == ["first", "b", "c", "last"]


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@engines
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("no rule for this context"), "no rule for this context"),
        (asyncio.CancelledError(), "cancelled"),  # a task of its own
        (PanicException(), "PanicException"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_what_a_processor_raises_names_it_and_concerns_one_request_alone(engine, raised, said):
    def choose(queries, rows):
        if any(query.token_ids[0] == 2 for query in queries):
            raise raised
        return rows

    asked = []
    made = engine(ByteTokenizer(), on_batch=lambda queries: asked.append(len(queries)))
    with opened(made, Processor(choose)) as lm:
        rows = gathered(*(lm.next_token_logprobs([i]) for i in range(4)))
        calls = len(asked)
        assert [type(row) for row in rows] == [torch.Tensor] * 2 + [PluginError] + [torch.Tensor]
        for word in ("Processor", "genlm_process_logprobs", said):
            assert word in str(rows[2])
        assert isinstance(rows[2].__cause__, Exception | PanicException)
        assert torch.equal(lm.next_token_logprobs_sync([3]), rows[3])
        assert len(asked) == calls, "the rows of the others are kept"
        assert calls == (1 if engine is MockEngine else 2), "the engine was asked again"


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        (lambda rows: None, "NoneType, not a tensor"),
        (lambda rows: rows[:, 1:], r"shape \(1, 257\)"),
        (lambda rows: rows.double(), r".*torch.float64, .*\(\.float\(\) converts\)"),
        (lambda rows: rows.to("meta"), "a .* tensor on meta; give a dense one"),
        (lambda rows: rows.to_sparse(), "a torch.sparse_coo tensor on cpu; give a dense one"),
        (lambda rows: rows.requires_grad_(), ".*requires_grad=True"),
    ],
)
def test_what_a_processor_must_not_return(returned, wrong):
    with (
        opened(MockEngine, Processor(lambda _, rows: returned(rows))) as lm,
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


def test_an_installed_processor_comes_before_those_given(install):
    source = """
        from genlm.core import hookimpl

        class Silencer:
            @hookimpl
            def genlm_process_logprobs(self, rows):
                rows[:, 9] = -float("inf")
                return rows.log_softmax(-1)
    """
    install("silencer", source, group="genlm.wrappers", target="plugin_silencer:Silencer")
    seen = []

    def watch(queries, rows):
        seen.append(float(rows[0, 9]))
        return rows

    with load_model_by_name("mock", backend="mock", wrappers=[Processor(watch)]) as lm:
        lm.next_token_logprobs_sync([1])
    assert seen == [-float("inf")]


def test_an_installed_wrapper_that_cannot_be_made_is_named(install):
    source = """
        class Demanding:
            def __init__(self):
                raise RuntimeError("no configuration")
    """
    install("demanding", source, group="genlm.wrappers", target="plugin_demanding:Demanding")
    with pytest.raises(BackendImportError, match=r"'demanding' is .*1\.2\).*no configuration"):
        load_model_by_name("mock", backend="mock")


# --- refused at load ------------------------------------------------------------------------------


def with_hook(hook, function, **marks):
    """An object with one hook."""
    return type("Given", (), {hook: hookimpl(**marks)(function)})()


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
        (ContinuousMockEngine, [], [ROWS, "genlm_sample", "genlm_add_lora"], STEP),
        (MockEngine, [], [STEP], ROWS),
        (MockEngine, [Processor(None)], ["genlm_sample"], ROWS),
        (MockEngine, [], ["genlm_process_logprobs"], ROWS),
        (MockEngine, [], ["genlm_load", "genlm_backend_info"], ROWS),
    ],
)
def test_an_observer_that_is_never_called_is_refused(engine, others, hooks, remedy):
    with pytest.raises(PluginError) as refused:
        opened(engine, *others, around(*hooks))
    said = str(refused.value)
    assert "Observer" in said
    assert f"let it go around {remedy}" in said
    assert "genlm_process_logprobs" in said


@pytest.mark.parametrize("hooks", [[ROWS, STEP], ["genlm_add_lora"]])
def test_an_observer_that_may_be_called_is_accepted(hooks):
    opened(ContinuousMockEngine, around(*hooks)).close()


class Unmarked:
    def genlm_process_logprobs(self, rows):
        return rows


async def asynchronous(self, rows): ...


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (object(), r"wrapper builtins.object has no hook; mark its methods"),
        (Unmarked(), "wrapper .*Unmarked: genlm_process_logprobs is not marked"),
        (Unmarked.genlm_process_logprobs, "Unmarked.genlm_process_logprobs is a function; make it"),
        (with_hook("genlm_close", lambda self: None), "wrapper .*Given .* would shadow"),
        (
            with_hook("genlm_close", lambda self: None, wrapper=True),
            "Given: genlm_close is a wrapper without a yield; write",
        ),
        (
            with_hook("genlm_process_logprobs", asynchronous),
            "Given: genlm_process_logprobs is async; hooks are plain",
        ),
        (
            with_hook("genlm_process_logprob", lambda self, rows: rows),
            "^wrapper .*Given: .*did you mean genlm_process_logprobs",
        ),
        (
            with_hook("genlm_process_logprobs", lambda self, query, rows: rows),
            "Given: .*no argument query; it may take queries, rows",
        ),
    ],
)
def test_what_is_no_wrapper_is_refused(wrapper, said):
    with pytest.raises(PluginError, match=said):
        opened(MockEngine, wrapper)


# --- observing ------------------------------------------------------------------------------------


class Both:
    """Goes around batches and steps."""

    @hookimpl(wrapper=True)
    def genlm_step(self):
        return (yield from self.observe())

    genlm_next_token_logprobs = genlm_step


class Interfering(Both):
    """Does not only observe: once."""

    def __init__(self, how):
        self.how = how
        self.done = False

    def observe(self):
        result = yield
        if self.done or not len(result):
            return result
        self.done = True
        return self.how(result)


@engines
@pytest.mark.parametrize(
    "how",
    [
        lambda result: isinstance(result, list) and result.pop(0),
        lambda result: {Query((9,)): OSError("of no request"), Query((1,)): "no error"},
        lambda result: 5,
    ],
)
def test_what_else_an_observer_returns_is_ignored(engine, how):
    wrapper = Interfering(how)
    contexts = [(1,), (2,), (3,)]
    with opened(engine, wrapper, check=True) as lm:
        rows = gathered(*map(lm.next_token_logprobs, contexts))
        assert lm.stats.failed_calls == 0
    for row, context in zip(rows, contexts, strict=True):
        assert torch.equal(row, row_of(*context))
    assert wrapper.done


@engines
def test_an_observer_that_writes_into_what_it_sees_is_named(engine):
    class Reverses:
        @hookimpl(wrapper=True)
        def genlm_sample(self):
            (yield)[0].reverse()

        @hookimpl(wrapper=True)
        def genlm_step(self):
            for answer in (yield):
                answer.result.reverse()

    class Pops:
        @hookimpl(wrapper=True)
        def genlm_next_token_logprobs(self, queries):
            yield queries.pop(0)

        @hookimpl(wrapper=True)
        def genlm_step(self, queries):
            yield queries.sort()

    def spoil(result):
        row = result[0]
        getattr(row, "result", row).zero_()

    written = r": genlm_\w+ wrote into what the engine gave"
    with opened(engine, Reverses()) as lm, pytest.raises(PluginError, match="Reverses" + written):
        lm.sample_sync([1], 4, [], seed=1)
    with opened(engine, Interfering(spoil)) as lm:
        with pytest.raises(PluginError, match="Interfering" + written):
            lm.next_token_logprobs_sync([1])
        assert torch.equal(lm.next_token_logprobs_sync([1]), row_of(1))
    with opened(engine, Pops()) as lm:
        for _ in range(2):
            with pytest.raises(PluginError, match=r"Pops: .* 'tuple' object has no attribute"):
                lm.batch_next_token_logprobs_sync([[1], [2]])


@pytest.mark.parametrize("kind", [tuple, deque])
def test_draws_and_scores_in_any_sequence_are_not_written_into(kind):
    class Own(MockEngine):
        @hookimpl
        def genlm_sample(self, queries, params):
            return kind(map(kind_of_draw, super().genlm_sample(queries, params)))

        @hookimpl
        def genlm_sequence_logprobs(self, queries, continuations):
            return kind(super().genlm_sequence_logprobs(queries, continuations))

    kind_of_draw = deque if kind is deque else list

    class Spoils:
        @hookimpl(wrapper=True)
        def genlm_sample(self):
            (yield)[0].reverse()

        @hookimpl(wrapper=True)
        def genlm_sequence_logprobs(self):
            (yield)[0].zero_()

    with opened(Own, Spoils()) as lm:
        with pytest.raises(PluginError, match="Spoils: genlm_sample wrote into"):
            lm.sample_sync([1], 4, [], seed=1)
        with pytest.raises(PluginError, match="Spoils: genlm_sequence_logprobs wrote into"):
            lm.sequence_logprobs_sync([1], [2, 3])


def test_answers_may_come_from_a_generator():
    class Lazy(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            yield from self.advance(queries)

    with opened(Lazy, around(STEP), check=True) as lm:
        assert torch.equal(lm.next_token_logprobs_sync([1]), row_of(1))


class Refusing:
    """Names requests to fail: draws when they come, rows when they are there."""

    def failing(self, requests):
        return {
            request: OSError("not today")
            for request in requests
            if getattr(request, "token_ids", (2,)) == (2,)
        }

    @hookimpl(wrapper=True)
    def genlm_sample(self, queries):
        yield
        return self.failing(queries)

    genlm_next_token_logprobs = genlm_process_logprobs = genlm_sample

    @hookimpl(wrapper=True)
    def genlm_step(self, samples):
        answers = yield
        return self.failing([*samples, *(answer.request for answer in answers)])


@engines
@pytest.mark.parametrize("others", [[], [Processor(same)]])
def test_a_wrapper_may_fail_requests_by_name(engine, others):
    with opened(engine, *others, Refusing()) as lm:
        row, refused, draw = gathered(
            lm.next_token_logprobs([1]), lm.next_token_logprobs([2]), lm.sample([2], 2, [], seed=1)
        )
        assert torch.equal(row, row_of(1))
        for error in (refused, draw):
            assert isinstance(error, PluginError)
            assert "Refusing: genlm_" in str(error)
            assert "OSError: not today" in str(error)
            assert isinstance(error.__cause__, OSError)
        assert lm.stats.failed_calls == 0, "the engine was not asked again"


@engines
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("its own bug"), "its own bug"),
        (asyncio.CancelledError(), "cancelled"),
        (PanicException(), "PanicException"),
    ],
)
def test_what_an_observer_raises_names_it_and_the_engine_goes_on(engine, before, raised, said):
    left = [raised]

    class Broken(Both):
        def observe(self):
            if before and left:
                raise left.pop()
            result = yield
            if left and len(result):
                raise left.pop()
            return result

    def answers(lm):
        return gathered(lm.next_token_logprobs([1]), lm.sample([3], 3, [], seed=1))

    with opened(engine, Broken()) as lm, opened(engine) as sound:
        met = [answer for answer in answers(lm) if isinstance(answer, Exception)]
        assert met
        for error in met:
            assert isinstance(error, PluginError)
            assert "Broken" in str(error)
            assert said in str(error)
            assert "backend" not in str(error)
        for answer, right in zip(answers(lm), answers(sound), strict=True):
            assert list(answer) == list(right)


def test_a_wrapper_that_yields_twice_is_named_and_ended():
    ended = []

    class Twice(Both):
        def observe(self):
            result = yield
            try:
                yield
            finally:
                ended.append(result)

    with (
        opened(MockEngine, Twice()) as lm,
        pytest.raises(PluginError, match=r"Twice: .*yields a second time"),
    ):
        lm.next_token_logprobs_sync([1])
    assert ended


@engines
def test_the_engines_error_stays_the_one_to_report(engine):
    seen = []

    class Swallowing(Both):
        def observe(self):
            try:
                return (yield)
            except Exception as error:
                seen.append(error)
                raise ValueError("another") from error

    with structlog.testing.capture_logs() as logs, opened(failing(engine), Swallowing()) as lm:
        row, failed = gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
    assert isinstance(row, torch.Tensor)
    assert isinstance(failed, EngineError)
    assert "told to fail" in str(failed)
    assert seen
    assert any("another" in log.get("error", "") for log in logs)


@engines
def test_failed_calls_are_counted_and_the_first_one_is_said(engine):
    with structlog.testing.capture_logs() as logs, opened(failing(engine)) as lm:
        gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
        assert lm.stats.failed_calls == 2  # both together, and the one alone
    said = [log for log in logs if log["event"] == "engine.call_failed"]
    assert [log["log_level"] for log in said] == ["warning"]
