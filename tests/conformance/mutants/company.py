"""Faults of continuous engines: somebody waits for somebody else's long work."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from attrs import evolve

from genlm.core import Answer, Query, hookimpl
from genlm.core.mock import ContinuousMockEngine
from genlm.core.types import Request, SampleRequest, ScoreRequest

from ..blind import at_work, fourth, of_the_mock
from ..blind.common import Keeping
from .registry import breaks

breaks("wake_in_the_middle_of_a_step", hangs=True)(fourth.WakeTakesTheLock)
breaks("nobody_is_passed_over")(of_the_mock.NewcomersAlwaysFirst)


class Continuous(ContinuousMockEngine):
    """Hands its steps to :meth:`step`."""

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        return self.step([*queries, *samples, *scores], dropped)

    def step(self, newcomers: list[Request], dropped: Sequence[Request]) -> list[Answer]:
        raise NotImplementedError


@breaks("nobody_is_passed_over")
class RowsBeforeDraws(Continuous):
    """A row takes one step; while rows keep coming, a draw under way waits."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{**options, "steps": 1})

    def step(self, newcomers, dropped):
        for request in dropped:
            del self._in_flight[request]
        if not newcomers:
            return self.advance([])
        waiting, self._in_flight = self._in_flight, {}
        answers = self.advance(newcomers)
        self._in_flight = {**waiting, **self._in_flight}
        return answers


@breaks("short_draw_returns_before_a_long_one")
class DrawsEndTogether(Continuous):
    """A batch of draws is returned when the longest of them ends."""

    def step(self, newcomers, dropped):
        longest = max(
            (r.params.max_tokens for r in newcomers if isinstance(r, SampleRequest)), default=0
        )
        answers = self.advance(newcomers, dropped)
        ended = [a for a in answers if isinstance(a.request, SampleRequest) and longest > 1]
        for answer in ended:
            self._in_flight[answer.request] = longest
        return [answer for answer in answers if answer not in ended]


@breaks("row_during_a_draw")
class RowsWaitForTheDraw(Continuous):
    """While a draw is in flight, rows are admitted and make no progress."""

    def step(self, newcomers, dropped):
        in_flight = [*self._in_flight, *newcomers]
        if any(isinstance(request, SampleRequest) for request in in_flight):
            for request in in_flight:
                if isinstance(request, Query):
                    self._in_flight[request] = self._steps + 1
            newcomers = [request for request in newcomers if not isinstance(request, Query)]
        return self.advance(newcomers, dropped)


@breaks("cancelled_draw_ends")
class DroppedDrawsRunOn(Continuous):
    """What is dropped is drawn to its end, and then answered."""

    def step(self, newcomers, dropped):
        answers = self.advance(newcomers)
        while any(request in self._in_flight for request in dropped):
            answers += self.advance([])
        return answers


@breaks("adapters_changed_in_flight", "https://github.com/sgl-project/sglang/pull/37824")
class DroppedDrawKeepsItsAdapter(Keeping, Continuous, in_use=list):
    """A draw that is dropped does not give back its adapter, so that one is never unloaded."""

    def step(self, newcomers, dropped):
        draws = [r for r in dropped if isinstance(r, SampleRequest)]
        self.in_use += [draw.query.adapter for draw in draws if draw.query.adapter]
        return self.advance(newcomers, dropped)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        if adapter in self.in_use:
            raise RuntimeError(f"the adapter {adapter.name} is in use")
        return super().genlm_remove_lora(adapter)


@breaks("contract_is_kept_throughout", "https://github.com/sgl-project/sglang/pull/35546")
class StepsShareOneBuffer(Continuous):
    """The rows of every step are views of one buffer, which the next step writes."""

    buffer: torch.Tensor | None = None

    def step(self, newcomers, dropped):
        answers = self.advance(newcomers, dropped)
        if self.buffer is None:
            self.buffer = torch.empty(64, self.vocab_size)
        found = zip(answers, self.buffer, strict=False)
        return [
            evolve(a, result=place.copy_(a.result)) if isinstance(a.request, Query) else a
            for a, place in found
        ] + answers[64:]


@breaks("close_fails_what_is_pending", hangs=True)
class CloseWaitsForWhatIsInFlight(Continuous):
    """Closing waits for what is in flight, and nobody steps any more."""

    def step(self, newcomers, dropped):
        return self.advance(newcomers, dropped)

    @hookimpl
    def genlm_close(self):
        if self._in_flight:
            threading.Event().wait(100.0)  # longer than the suite has patience


@breaks("contract_is_kept_throughout")
class WakeRaises(Continuous):
    """Wakes by a queue that another version had."""

    def step(self, newcomers, dropped):
        return self.advance(newcomers, dropped)

    @hookimpl
    def genlm_wake(self):
        self._wakes.put(None)


breaks("cancelled_requests_leave_nothing", max_context=1024, hangs=True)(
    at_work.PlaceLeaksWithADroppedDraw
)

#: What shows where requests meet.
for engine, clause in {
    at_work.GeneratorsDoNotMoveUp: "requests_on_a_schedule",
    at_work.ScoresOfADroppedPrompt: "cancelled_requests_leave_nothing",
    at_work.EightShortestRun: "nobody_waits_behind_a_crowd",
    at_work.DeferredBehindNewcomers: "nobody_waits_behind_a_crowd",
    at_work.SecondWakeIsLost: "row_during_a_draw",
    at_work.PinnedAreNotMoved: "pinned_contexts_are_moved_with_the_others",
    at_work.PinsOfRemovedAdaptersStay: "adapters_are_bound_and_pinned_again_and_again",
    at_work.ScoresFromAHundredOn: "long_continuations",
    at_work.DrawsInARingOf128: "long_continuations",
    at_work.PositionsEndAt512: "cold_rows_are_the_reference",
}.items():
    breaks(clause, max_context=1024)(engine)
