"""The object through which clauses ask a model."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import strategies as st

from genlm.conformance import ConformanceSuite, Violation
from genlm.conformance.agreement import MovedDraw
from genlm.conformance.driver import Driver
from genlm.conformance.properties import for_all
from genlm.conformance.report import counterexample, run
from genlm.conformance.subject import Subject
from genlm.core import Adapter, Answer, EngineDeadError, Query, hookimpl
from genlm.core.mock import ContinuousMockEngine, MockEngine
from genlm.core.types import Request
from genlm.kit.memory import lower

from .faulty import OfTheMock, verdict_on

pytestmark = pytest.mark.any_version


def test_call_ends_quietly_after_its_caller_gave_up() -> None:
    subject = Subject(ConformanceSuite())
    may_end = threading.Event()
    call = subject.thread(may_end.wait)

    async def give_up() -> None:
        waiting = asyncio.ensure_future(asyncio.wrap_future(call))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    may_end.set()
    assert call.result(timeout=60) is True


class Slow(Driver):
    """Of an engine that makes a call whenever patience is at its end, and answers in the fifth."""

    def __init__(self, step: int) -> None:
        super().__init__(patience=0.01)
        self.answer: asyncio.Future[str] = asyncio.Future()
        self._step, self._calls = step, 0

    @property
    def calls(self) -> int:
        self._calls += self._step
        if self._calls == 5:
            self.answer.set_result("at last")
        return self._calls


def test_slow_engine_does_not_hang() -> None:
    async def scenario() -> str:
        slow = Slow(1)
        return await slow.soon(slow.answer)

    assert asyncio.run(scenario()) == "at last"


@pytest.mark.parametrize("calls", [0, 2000])
def test_engine_without_calls_or_with_endless_calls_hangs(calls: int) -> None:
    async def scenario() -> None:
        slow = Slow(calls)
        await slow.soon(slow.answer)

    with pytest.raises(Violation, match=r"a caller got no answer within 0\.01 s: it hangs"):
        asyncio.run(scenario())


def test_hang_tells_what_was_done_before_it() -> None:
    async def scenario() -> None:
        slow = Slow(0)
        slow.note("remove_lora('a')")
        await slow.soon(slow.answer)

    with pytest.raises(Violation, match=r"it hangs, [^\n]*\n  before it: remove_lora\('a'\)"):
        asyncio.run(scenario())


def test_flaky_failure_shows_the_violation() -> None:
    suite = ConformanceSuite()
    suite.backend = suite.model = "mock"
    subject = Subject(suite)
    failures = iter([True])

    with pytest.raises(Violation, match="is wrong") as failed:

        @for_all(subject, number=st.integers())
        def holds(number: int) -> None:
            if next(failures, False):
                raise Violation(f"{number} is wrong")

    subject.close()
    said = counterexample(failed.value)
    assert said.startswith("Violation: ")
    assert "The same example does not fail every time." in said
    assert "Traceback" not in said


def test_every_kind_of_violation_is_called_a_violation() -> None:
    assert counterexample(MovedDraw("it draws [1]")) == "Violation: it draws [1]"


def test_exception_group_is_told_line_by_line() -> None:
    said = counterexample(ExceptionGroup("two", [KeyError("no slot"), ValueError("no name")]))
    assert said.splitlines()[-2:] == ["KeyError: 'no slot'", "ValueError: no name"]


class Raises(MockEngine):
    """A helper of the engine raises for longer contexts."""

    def row(self, query: Query) -> torch.Tensor:
        if query.length > 20:
            self.look_up(query)
        return super().row(query)

    def look_up(self, query: Query) -> None:
        raise KeyError("no such block")

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        return super().genlm_next_token_logprobs(queries)


def test_exception_of_the_engine_says_where_it_was_raised() -> None:
    verdict = verdict_on(OfTheMock(Raises, 0.1), "large_batch")
    assert verdict.status == "failed"
    assert "raised by the engine's own code, in genlm_next_token_logprobs: " in verdict.detail
    assert __file__ in verdict.detail
    assert "in look_up" in verdict.detail


class DiesOnce(MockEngine):
    """Dies of the first longer context, and does not when it is loaded again."""

    has_died: ClassVar[list[Query]] = []

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        if not self.has_died and (long := [one for one in queries if one.length > 20]):
            self.has_died.extend(long)
            raise EngineDeadError("out of slots")
        return super().genlm_next_token_logprobs(queries)


def test_dead_engine_fails_two_clauses_and_is_loaded_again() -> None:
    """One more, since the clause in which it dies may not see it."""
    wanted = ("rows_at_every_length", "draws_are_separate", "many_adapters", "adapters_in_turn")
    report = run(OfTheMock(DiesOnce, 0.1), only=lambda name: name in wanted)
    assert [len(report.failed), len(report.verdicts)] == [2, 4]
    assert all("out of slots" in verdict.detail for verdict in report.failed)


class RaisesOnce(MockEngine):
    """The first adapter cannot be removed."""

    removed = 0

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self.removed += 1
        if self.removed == 1:
            raise KeyError("no such slot")
        return super().genlm_remove_lora(adapter)


def test_failed_removal_of_an_adapter_fails_one_clause() -> None:
    wanted = ("removed_adapter", "adapters_changed_in_flight", "many_adapters")
    (verdict,) = run(OfTheMock(RaisesOnce, 0.1), only=lambda name: name in wanted).failed
    assert verdict.clause == "removed_adapter"
    assert verdict.violation
    assert re.match(r"Violation: a valid call raised \w+: .*no such slot", verdict.detail)
    assert "before it: remove_lora(" in verdict.detail


class RefusesLargeTopK(MockEngine):
    """Raises for a ``top_k`` beyond the vocabulary."""

    @hookimpl
    def genlm_sample(self, queries: Sequence[Query], params: Sequence[Any]) -> list[list[int]]:
        for how in params:
            torch.zeros(self.vocab_size).topk(how.top_k or 1)
        drawn: list[list[int]] = super().genlm_sample(queries, params)
        return drawn


def test_refused_draw_is_a_violation_that_names_its_options() -> None:
    verdict = verdict_on(OfTheMock(RefusesLargeTopK, 0.1), "top_k_beyond_the_vocabulary")
    assert verdict.violation
    said = (
        r"Violation: a draw of 4 tokens after \[.*\] with seed=\d+, top_k=\d+ raised EngineError: "
    )
    assert re.match(said, verdict.detail)
    assert "index k out of range" in verdict.detail


class RefusesEvenLengths(MockEngine):
    """Raises for contexts of an even number of tokens."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        if any(query.length % 2 == 0 for query in queries):
            raise IndexError("no such position")
        return super().genlm_next_token_logprobs(queries)


def test_refused_row_is_a_violation_that_names_its_context() -> None:
    verdict = verdict_on(OfTheMock(RefusesEvenLengths, 0.1), "row_is_normalised")
    assert verdict.violation
    said = r"Violation: the (cold )?row of \[.* raised EngineError: .*no such position"
    assert re.match(said, verdict.detail)
    assert verdict.detail.count("raised by the engine's own code") == 1


class Doubles(MockEngine):
    """Rows of another type."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        return super().genlm_next_token_logprobs(queries).double()


def test_violation_is_told_by_one_clause_only() -> None:
    wanted = ("engine_keeps_its_contract", "contract_is_kept_throughout")
    (verdict,) = run(OfTheMock(Doubles, 0.1), only=lambda name: name in wanted).failed
    assert verdict.clause == "engine_keeps_its_contract"
    assert verdict.detail.count("torch.float64") == 1


class OneAtATime(MockEngine):
    """Raises where several contexts come together."""

    error: ClassVar[Exception]

    @hookimpl
    def genlm_next_token_logprobs(self, queries: Sequence[Query]) -> torch.Tensor:
        if len(queries) > 1:
            with lower("batch_size"):
                raise self.error
        return super().genlm_next_token_logprobs(queries)


@pytest.mark.parametrize(
    ("error", "failed"), [(KeyError("slot"), ["contract_is_kept_throughout"]), (MemoryError(), [])]
)
def test_error_of_a_batch_fails_unless_memory_ran_out(
    error: Exception, failed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OneAtATime, "error", error, raising=False)
    wanted = ("batch_answers_in_order", "contract_is_kept_throughout")
    report = run(OfTheMock(OneAtATime, 0.1), only=lambda name: name in wanted)
    assert [verdict.clause for verdict in report.failed] == failed
    assert all("requests together: KeyError: 'slot'" in each.detail for each in report.failed)


class Fewer(MockEngine):
    """A model with fewer ids than its tokenizer."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.vocab_size = 250


def test_token_ids_beyond_the_model_are_not_asked_for() -> None:
    wanted = (
        "row_depends_on_every_token",
        "rows_at_every_length",
        "scores_together",
        "tokens_from_all_over_the_vocabulary",
        "first_and_last_token_stop",
    )
    report = run(OfTheMock(Fewer, 0.1), only=lambda name: name in wanted)
    assert [verdict.status for verdict in report.verdicts] == ["passed"] * len(wanted)


class ScoresWrongly(MockEngine):
    """With padded embeddings, and wrong scores, which the core does not ask for then."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.vocab_size = 264

    @hookimpl
    def genlm_sequence_logprobs(self, continuations: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        return [torch.zeros(len(tokens)) for tokens in continuations]


def test_scores_made_from_rows_are_skipped() -> None:
    verdict = verdict_on(OfTheMock(ScoresWrongly, 0.1), "scores_together")
    assert verdict.status == "skipped"
    assert "scores were made from rows" in verdict.detail


class OfTheMockWithWideRows(OfTheMock):
    """Its reference rows are as wide as a model with padded embeddings."""

    def reference_rows(
        self, contexts: Sequence[Sequence[int]], adapter: str | None = None
    ) -> Sequence[torch.Tensor]:
        return [torch.zeros(300) for _ in contexts]


def test_reference_rows_of_another_width_are_named() -> None:
    verdict = verdict_on(OfTheMockWithWideRows(MockEngine, 0.1), "cold_rows_are_the_reference")
    assert verdict.status == "failed"
    assert "the reference row of [" in verdict.detail
    assert "has the shape (300,), not (258,)" in verdict.detail


class AnswersTogetherLater(ContinuousMockEngine):
    """Answers one request a call, and from the fourth clear on all that are ready."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.clears, self.ready = 0, list[Answer]()

    @hookimpl
    def genlm_step(self, queries: Sequence[Query], dropped: Sequence[Request]) -> list[Answer]:
        self.ready += self.advance(queries, [one for one in dropped if one in self._in_flight])
        count = 1 if self.clears < 4 else len(self.ready)
        answers, self.ready = self.ready[:count], self.ready[count:]
        return answers

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self.clears += 1
        super().genlm_clear_kv_cache()


def test_rows_that_the_suite_keeps_do_not_count_as_left() -> None:
    verdict = verdict_on(OfTheMock(AnswersTogetherLater, 0.1), "nothing_grows")
    assert verdict.status == "passed", verdict.detail


class EndsLater(MockEngine):
    """A thread of each model goes a while after the model is closed."""

    may_end: ClassVar[list[threading.Event]] = []

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.may_end.append(threading.Event())
        threading.Thread(target=self.may_end[-1].wait, daemon=True).start()


def test_thread_that_ends_soon_after_close_is_not_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def some_time_passes(seconds: float) -> None:
        for event in EndsLater.may_end[1:]:  # The first is the model under test.
            event.set()

    monkeypatch.setattr(time, "sleep", some_time_passes)
    verdict = verdict_on(OfTheMock(EndsLater, 0.1), "nothing_is_left_after_close")
    assert verdict.status == "passed"
    under_test, *further = EndsLater.may_end
    under_test.set()
    assert len(further) == 1, "its first use was not taken as well"
