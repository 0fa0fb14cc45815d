"""Wrappers that observe the calls of an engine's hooks, and can change nothing."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
import structlog
import torch

from genlm.core import EngineDeadError, EngineError, PluginError, hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine

from .conftest import gathered
from .doubles import row_of
from .test_wrappers import PanicException, engines, failing, opened, with_hook


class Observer:
    """Does something at the end of each evaluation."""

    def __init__(self, happens):
        self.happens = happens

    @hookimpl
    def genlm_call_ended(self, hook, result, error):
        if hook in ("genlm_step", "genlm_next_token_logprobs", "genlm_sample"):
            self.happens(result, error)


@engines
def test_every_call_but_a_wake_is_announced_and_ended(engine):
    told = []

    class Both:
        @hookimpl
        def genlm_call_begins(self, hook, arguments):
            told.append((hook, [*arguments]))

        @hookimpl
        def genlm_call_ended(self, hook, arguments, result, error):
            began, names = told.pop()
            assert (began, names) == (hook, [*arguments])
            assert error is None
            seen.append(hook)

    seen = []
    with opened(engine, Both()) as lm:
        lm.next_token_logprobs_sync([1])
        lm.add_new_lora("first", "folder")
        lm.clear_kv_cache()
    evaluated = ["genlm_next_token_logprobs"] if engine is MockEngine else 2 * ["genlm_step"]
    assert not told
    assert seen == [*evaluated, "genlm_add_lora", "genlm_clear_kv_cache", "genlm_close"]


@engines
def test_an_observer_sees_the_error_of_a_call_and_callers_get_it(engine):
    seen = []
    with opened(
        failing(engine), Observer(lambda result, error: seen.append((result, error)))
    ) as lm:
        row, failed = gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
    assert torch.equal(row, row_of(1))
    assert isinstance(failed, EngineError)
    assert "told to fail" in str(failed)
    assert [(result, "told to fail" in str(error)) for result, error in seen if error] == [
        (None, True)
    ] * 2  # the two together, and one of them alone


@engines
def test_observers_get_immutable_sequences(engine):
    def refused(*changes):
        for change in changes:
            with pytest.raises(AttributeError):
                change()

    class Takes:
        @hookimpl
        def genlm_call_begins(self, arguments):
            refused(lambda: arguments.clear(), lambda: arguments.get("queries", ()).sort())

        @hookimpl
        def genlm_call_ended(self, hook, result):
            if hook in ("genlm_step", "genlm_sample"):
                refused(lambda: result.pop())
                for one in result:
                    refused(lambda one=one: getattr(one, "result", one).reverse())

    with structlog.testing.capture_logs() as logs, opened(engine, Takes()) as lm:
        draw = lm.sample_sync([1], 4, [], seed=1)
    with opened(engine) as sound:
        assert draw == sound.sample_sync([1], 4, [], seed=1)
    assert not [log for log in logs if log["event"] == "observer.failed"]


@engines
def test_an_observer_that_writes_into_rows_is_named_where_results_are_checked(engine):
    def spoil(result, error):
        for row in result:
            getattr(row, "result", row).zero_()

    with opened(engine, Observer(spoil), check=True) as lm:
        with pytest.raises(PluginError, match="Observer: genlm_call_ended wrote into what the eng"):
            lm.next_token_logprobs_sync([1])
        assert lm.stats.failed_calls == 0


@engines
@pytest.mark.parametrize("hook", ["genlm_call_begins", "genlm_call_ended"])
@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (RuntimeError("its own bug"), "its own bug"),
        (asyncio.CancelledError(), "cancelled"),
        (PanicException(), "PanicException"),
    ],
)
def test_observer_that_raises_is_logged_once_and_fails_no_request(engine, hook, raised, said):
    def broken(self):
        raise raised

    seen = []
    broken = with_hook(hook, broken)
    with (
        structlog.testing.capture_logs() as logs,
        opened(engine, broken, Observer(lambda result, error: seen.append(result))) as lm,
    ):
        row, draw = gathered(lm.next_token_logprobs([1]), lm.sample([3], 3, [], seed=1))
    with opened(engine) as sound:
        assert torch.equal(row, row_of(1))
        assert draw == sound.sample_sync([3], 3, [], seed=1)
    assert seen, "the other observer was notified"
    (failed,) = [log for log in logs if log["event"] == "observer.failed"]
    assert f"Given: {hook} raised" in failed["error"]
    assert said in failed["error"]


def test_an_observer_that_ends_the_program_ends_the_model():
    def leave(result, error):
        raise SystemExit

    with opened(MockEngine, Observer(leave)) as lm, pytest.raises(EngineDeadError):
        lm.next_token_logprobs_sync([1])


@pytest.mark.parametrize("kind", [tuple, deque])
def test_draws_and_scores_may_come_in_any_sequence(kind):
    class Own(MockEngine):
        @hookimpl
        def genlm_sample(self, queries, params):
            return kind(map(kind, super().genlm_sample(queries, params)))

        @hookimpl
        def genlm_sequence_logprobs(self, queries, continuations):
            return kind(super().genlm_sequence_logprobs(queries, continuations))

    def results(lm):
        return lm.sample_sync([1], 4, [], seed=1), lm.sequence_logprobs_sync([1], [2, 3]).tolist()

    with opened(Own, Observer(lambda result, error: None)) as lm, opened(MockEngine) as sound:
        assert results(lm) == results(sound)


def test_answers_may_come_from_a_generator():
    class Lazy(ContinuousMockEngine):
        @hookimpl
        def genlm_step(self, queries):
            yield from self.advance(queries)

    with opened(Lazy, Observer(lambda result, error: None), check=True) as lm:
        assert torch.equal(lm.next_token_logprobs_sync([1]), row_of(1))


@engines
def test_failed_calls_are_counted_and_the_first_is_reported(engine):
    with structlog.testing.capture_logs() as logs, opened(failing(engine)) as lm:
        gathered(lm.next_token_logprobs([1]), lm.next_token_logprobs([2]))
        assert lm.stats.failed_calls == 2  # the two together, and one of them alone
    said = [log for log in logs if log["event"] == "engine.call_failed"]
    assert [log["log_level"] for log in said] == ["warning"]
