"""Wrappers that change rows, and wrappers that are rejected at load."""

from __future__ import annotations

import asyncio
import dataclasses
import re

import pytest
import torch

from genlm.core import (
    AsyncLM,
    BackendImportError,
    EngineError,
    PluginError,
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
    """A wrapper that equals any other with the same number, and is not hashable."""

    power: float

    @hookimpl
    def genlm_process_logprobs(self, rows):
        return (self.power * rows).log_softmax(-1)


def test_wrappers_are_distinguished_by_identity():
    expected = (4 * row_of(1)).log_softmax(-1)
    once = Power(2)
    for given in ((Power(2), Power(2)), (once, once)):
        with opened(MockEngine, *given) as lm:
            torch.testing.assert_close(lm.next_token_logprobs_sync([1]), expected)


@pytest.mark.parametrize("how", ["inference", "expanded", "kept"])
def test_next_processor_may_write_into_the_rows_of_the_one_before(how):
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
def test_processor_is_called_once_for_the_rows_of_a_batch_or_step(engine):
    """Its rows are as wide as the vocabulary, and not as the engine."""
    calls = []

    def change(queries, rows):
        calls.append(([query.token_ids for query in queries], tuple(rows.shape)))
        rows[:, 5] = -float("inf")  # writing into them is allowed
        return rows.log_softmax(-1)

    with opened(padded(engine, 320), Processor(change)) as lm:
        lm.batch_next_token_logprobs_sync([[1], [2], [3]])
        row = lm.next_token_logprobs_uncached([4])
    assert calls == [([(1,), (2,), (3,)], (3, 258)), ([(4,)], (1, 258))]
    assert abs(row.logsumexp(0)) < 1e-5


def test_row_with_mass_only_on_missing_tokens_has_no_mass():
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


@engines
@pytest.mark.parametrize("check", [None, True])
def test_error_names_the_processor_whose_rows_are_not_normalised(engine, check):
    def sharpened(queries, rows):
        return 2 * rows

    named = type("Sharpened", (Processor,), {})
    given = [Processor(same), named(sharpened), Processor(same)]
    with opened(engine, *given, check=check) as lm:
        with pytest.raises(PluginError) as raised:
            lm.next_token_logprobs_sync([1])
        assert re.match(
            r"\S*Sharpened: genlm_process_logprobs returned a row with", str(raised.value)
        )


@engines
def test_rows_in_a_buffer_that_the_next_call_uses_again_stay_right(engine):
    """A batch that is split after an error calls the hook again before the first rows are copied,
    and a caller of several rows may wait for the next step."""
    buffer = torch.zeros(8, 258)

    def refusing(queries, rows):
        if any(query.token_ids == (3,) for query in queries):
            raise KeyError("no rule for this context")
        buffer[: len(rows)] = (2 * rows).log_softmax(-1)
        return buffer[: len(rows)]

    def expected(i):
        return (2 * row_of(i)).log_softmax(-1)

    with opened(engine, Processor(refusing)) as lm:
        rows = gathered(*(lm.next_token_logprobs([i]) for i in range(5)))
        for i in (0, 1, 2, 4):
            torch.testing.assert_close(rows[i], expected(i))
            # From the cache.
            torch.testing.assert_close(lm.next_token_logprobs_sync([i]), expected(i))
    with opened(engine, Processor(refusing), batch_size=1) as lm:
        rows = lm.batch_next_token_logprobs_sync([[1], [2]])
        torch.testing.assert_close(rows, torch.stack([expected(1), expected(2)]))


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
    """An exception as libraries in Rust raise it."""


@engines
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyError("no rule for this context"), "no rule for this context"),
        (asyncio.CancelledError(), "cancelled"),  # the wrapper's own task was cancelled
        (PanicException(), "PanicException"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_error_of_a_processor_names_it_and_fails_one_request(engine, raised, said):
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
        assert rows[2].__cause__ is not None
        assert torch.equal(lm.next_token_logprobs_sync([3]), rows[3])
        assert len(asked) == calls, "the rows of the others are kept"
        assert calls == (1 if engine is MockEngine else 2), "the engine was asked again"


@pytest.mark.parametrize(
    ("returned", "wrong"),
    [
        (lambda rows: None, "None, not a tensor"),
        (lambda rows: rows[:, 1:], r"shape \(1, 257\)"),
        (lambda rows: rows.double(), r".*torch.float64, .*\(\.float\(\) converts\)"),
        (lambda rows: rows.to("meta"), "a .* tensor on meta; give a dense one"),
        (lambda rows: rows.to_sparse(), "a torch.sparse_coo tensor on cpu; give a dense one"),
        (lambda rows: rows.requires_grad_(), ".*requires_grad=True"),
    ],
)
def test_invalid_result_of_a_processor_names_it(returned, wrong):
    with (
        opened(MockEngine, Processor(lambda _, rows: returned(rows))) as lm,
        pytest.raises(PluginError, match=f"Processor: genlm_process_logprobs returned {wrong}"),
    ):
        lm.next_token_logprobs_sync([1])


def test_wrappers_own_plugin_error_is_unchanged():
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


class Unmarked:
    def genlm_process_logprobs(self, rows):
        return rows


async def asynchronous(self, rows): ...


def around(self):
    yield


@pytest.mark.parametrize(
    ("wrapper", "said"),
    [
        (object(), r"wrapper builtins.object has no hook; to change rows, implement"),
        (Unmarked(), "wrapper .*Unmarked: genlm_process_logprobs is not marked"),
        (Unmarked.genlm_process_logprobs, "Unmarked.genlm_process_logprobs is a function; make it"),
        (
            with_hook("genlm_close", lambda self: None),
            "wrapper .*Given .* would shadow .*; to change",
        ),
        (
            with_hook("genlm_step", around, wrapper=True),
            "Given: genlm_step is marked as a wrapper.*genlm_process_logprobs.*genlm_call_begins",
        ),
        (with_hook("genlm_process_logprobs", around, hookwrapper=True), "marked as a wrapper"),
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
def test_wrapper_with_an_invalid_hook_is_rejected(wrapper, said):
    with pytest.raises(PluginError, match=said):
        opened(MockEngine, wrapper)


def test_an_engine_whose_hook_is_marked_as_a_wrapper_is_rejected():
    marked = hookimpl(wrapper=True)(around)
    with pytest.raises(PluginError, match=r"Around .*_logprobs is marked as a wrapper"):
        opened(type("Around", (MockEngine,), {"genlm_next_token_logprobs": marked}))


def test_specname_and_other_marks_work_as_in_pluggy():
    class Marked:
        @property
        def lacking(self):
            raise AssertionError("no property is read")

        @hookimpl(specname="genlm_process_logprobs")
        def sharper(self, rows):
            return (2 * rows).log_softmax(-1)

        @hookimpl(optionalhook=True)
        def genlm_of_a_later_version(self):
            return None

        @staticmethod
        @hookimpl
        def genlm_call_ended(hook):
            ended.append(hook)

    ended = []
    with opened(MockEngine, Marked()) as lm:
        torch.testing.assert_close(
            lm.next_token_logprobs_sync([1]), (2 * row_of(1)).log_softmax(-1)
        )
    assert ended == ["genlm_next_token_logprobs", "genlm_close"]
