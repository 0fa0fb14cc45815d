"""Faults where requests meet: somebody waits for somebody else's long work, or gets what is his."""

from __future__ import annotations

import threading
import time

import torch

from genlm.core import Query, hookimpl
from genlm.core.drawer import TokenDrawer
from genlm.core.mock import ContinuousMockEngine
from genlm.core.types import SampleRequest, query_of

from .registry import Keeping, breaks
from .rows import BLOCK
from .working_engine import WorkingEngine


class Continuous(ContinuousMockEngine):
    """Hands its steps to :meth:`step`."""

    @hookimpl
    def genlm_step(self, queries, samples, scores, dropped):
        return self.step([*queries, *samples, *scores], dropped)

    def step(self, new_requests, dropped):
        return self.advance(new_requests, dropped)


@breaks("nobody_is_passed_over", "https://github.com/sgl-project/sglang/issues/32549")
class NewRequestsFirst(Continuous):
    """New requests are served before those in flight, who wait as long as new requests come."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **{**options, "steps": 1})

    def step(self, new_requests, dropped):
        for request in dropped:
            del self._in_flight[request]
        if not new_requests:
            return self.advance([])
        waiting, self._in_flight = self._in_flight, {}
        answers = self.advance(new_requests)
        self._in_flight = {**waiting, **self._in_flight}
        return answers


@breaks("nobody_is_passed_over")
class NewRequestsFirstInThisProcess(NewRequestsFirst):
    """No step is cut short."""

    genlm_wake = None


@breaks("short_draw_returns_before_a_long_one")
class DrawsEndTogether(Continuous):
    """A batch of samples is returned when the longest of them ends."""

    def step(self, new_requests, dropped):
        longest = max(
            (r.params.max_tokens for r in new_requests if isinstance(r, SampleRequest)), default=0
        )
        answers = self.advance(new_requests, dropped)
        ended = [a for a in answers if isinstance(a.request, SampleRequest) and longest > 1]
        for answer in ended:
            self._in_flight[answer.request] = longest
        return [answer for answer in answers if answer not in ended]


@breaks("row_during_a_draw")
class RowsWaitForTheDraw(Continuous):
    """While a sample is in flight, rows are admitted and make no progress."""

    def step(self, new_requests, dropped):
        in_flight = [*self._in_flight, *new_requests]
        if any(isinstance(request, SampleRequest) for request in in_flight):
            for request in in_flight:
                if isinstance(request, Query):
                    self._in_flight[request] = self._steps + 1
            new_requests = [request for request in new_requests if not isinstance(request, Query)]
        return self.advance(new_requests, dropped)


@breaks("cancelled_draw_ends")
class DroppedDrawsRunOn(Continuous):
    """Dropped samples run to their end, and are then answered."""

    def step(self, new_requests, dropped):
        answers = self.advance(new_requests)
        while any(request in self._in_flight for request in dropped):
            answers += self.advance([])
        return answers


@breaks("adapters_changed_in_flight", "https://github.com/sgl-project/sglang/pull/37824")
class DroppedDrawKeepsItsAdapter(Keeping, Continuous, in_use=list):
    """A sample that is dropped does not give back its adapter, so that one is never unloaded."""

    def step(self, new_requests, dropped):
        draws = [r for r in dropped if isinstance(r, SampleRequest)]
        self.in_use += [draw.query.adapter for draw in draws if draw.query.adapter]
        return self.advance(new_requests, dropped)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        if adapter in self.in_use:
            raise RuntimeError(f"the adapter {adapter.name} is in use")
        return super().genlm_remove_lora(adapter)


@breaks("contract_is_kept_throughout", "https://github.com/sgl-project/sglang/pull/35546")
class StepsShareOneBuffer(Keeping, Continuous, buffer=lambda: torch.empty(64, 258)):
    """The rows of every step are views of one buffer, which the next step writes."""

    def step(self, new_requests, dropped):
        answers = self.advance(new_requests, dropped)
        for i, answer in enumerate(answers[:64]):
            if isinstance(answer.request, Query):
                answers[i] = answer._replace(result=self.buffer[i].copy_(answer.result))
        return answers


@breaks("contract_is_kept_throughout")
class WakeRaises(Continuous):
    """Wakes by a queue that another version had."""

    @hookimpl
    def genlm_wake(self):
        self._wakes.put(None)


@breaks("wake_in_the_middle_of_a_step", hangs=True)
class WakeTakesTheLock(Keeping, Continuous, lock=threading.Lock):
    @hookimpl
    def genlm_wake(self):
        with self.lock:
            super().genlm_wake()

    def step(self, new_requests, dropped):
        with self.lock:
            return self.advance(new_requests, dropped)


@breaks("wake_returns_while_a_step_runs")
class WakeWaitsForASlowStep(WakeTakesTheLock, woken=threading.Event):
    """A step takes a while, and holds the lock that a wake takes."""

    @hookimpl
    def genlm_wake(self):
        self.woken.set()
        super().genlm_wake()

    def step(self, new_requests, dropped):
        with self.lock:
            if new_requests:
                # However busy the machine is, the wake comes while the step runs.
                self.woken.clear()
                self.woken.wait(0.5)
                time.sleep(0.3)
            return self.advance(new_requests, dropped)


@breaks("close_fails_what_is_pending", hangs=True)
class CloseWaitsForWhatIsInFlight(Continuous):
    """Closing waits for what is in flight, and nobody steps any more."""

    @hookimpl
    def genlm_close(self):
        if self._in_flight:
            threading.Event().wait(100.0)  # This is longer than the suite's patience.


# --- of an engine with places and blocks ----------------------------------------------------------


@breaks("cancelled_requests_leave_nothing", "https://github.com/tenstorrent/tt-metal/issues/46350")
class GeneratorsDoNotMoveUp(WorkingEngine):
    """A sample that takes another one's place goes on with that one's random numbers."""

    def move(self, source, target):
        drawer = self.batch[target].drawer
        super().move(source, target)
        if drawer is not None and self.batch[target].drawer is not None:
            self.batch[target].drawer = drawer


@breaks(
    "cancelled_requests_leave_nothing",
    "https://github.com/raullenchai/Rapid-MLX/issues/1759",
    hangs=True,
)
class PlaceLeaksWithADroppedDraw(WorkingEngine):
    """A sample that has begun and is dropped keeps its place for ever."""

    def drop(self, request):
        if any(job.request == request and job.drawn for job in self.batch):
            self.places -= 1
        super().drop(request)


@breaks("cancelled_requests_leave_nothing", "https://github.com/vllm-project/vllm/issues/23697")
class AbortMeetsTheSameRequestAgain(WorkingEngine):
    """A request that is dropped takes an equal one with it that waits."""

    def drop(self, request):
        super().drop(request)
        query = query_of(request)
        self.waiting = [job for job in self.waiting if query_of(job.request) != query]


@breaks("cancelled_requests_leave_nothing", "https://github.com/sgl-project/sglang-jax/pull/1008")
class ProgressOfADroppedPrompt(WorkingEngine):
    """A new request begins with what was computed of a prompt that was dropped half-way."""

    left: list[int] = []  # noqa: RUF012  (never changed)

    def drop(self, request):
        for job in self.batch:
            if job.request == request and len(job.state) < job.prompt:
                self.left = job.state
        super().drop(request)

    def place(self, job):
        super().place(job)
        begin, self.left = self.left[: job.prompt - 1], []
        job.state[: len(begin)] = begin


@breaks("cancelled_requests_leave_nothing")
class SetBackDrawsTheSameNumbers(WorkingEngine):
    """If memory runs out, a sample is preempted, and continues with its first random numbers."""

    room = 700

    def set_back(self, job):
        if job.drawer is not None:
            job.drawer = TokenDrawer(job.request.params)
        super().set_back(job)


@breaks("nobody_waits_behind_a_crowd", "https://github.com/sgl-project/sglang/issues/32549")
class EightShortestRun(WorkingEngine):
    """In every step the eight shortest run."""

    def order(self):
        return sorted(super().order(), key=lambda at: len(self.batch[at].tokens))[:8]


class Woken(Keeping, WorkingEngine, bell=threading.Event):
    """A sound engine whose step ends when something is finished, or when it is woken."""

    @hookimpl
    def genlm_wake(self):
        self.bell.set()

    def step(self):
        while True:
            answers = super().step()
            if answers or not (self.batch or self.waiting) or self.woken():
                return answers

    def woken(self):
        if self.bell.is_set():
            self.bell.clear()
            return True
        return False


@breaks("row_during_a_draw", "https://github.com/vllm-project/vllm/issues/17972")
class SecondWakeIsLost(Woken):
    """Woken once, an engine is not woken again before something is finished."""

    awake = False

    def step(self):
        answers = super().step()
        if answers:
            self.awake = False
        return answers

    def woken(self):
        if self.awake:
            self.bell.clear()
        woken = super().woken()
        self.awake |= woken
        return woken


@breaks(
    "all_lengths_in_one_batch",
    "https://github.com/karpathy/nanochat/issues/187",
    max_context=1024,
)
class TablesGrowByTheirFirstColumns(WorkingEngine):
    """When a ninth, a 17th or a 33rd request runs, the tables grow, and 256 columns are copied."""

    def place(self, job):
        if len(self.batch) in (8, 16, 32):
            for other in self.batch:
                other.state[256:] = [0] * len(other.state[256:])
        super().place(job)


@breaks(
    "pinned_contexts_are_moved_with_the_others",
    "https://github.com/ggml-org/llama.cpp/issues/12253",
)
class PinnedAreNotMoved(WorkingEngine):
    """When kept contexts make room, the others move up by a block; the pinned ones are
    forgotten."""

    def keep(self, job):
        full = len(self.kept) == self.prefixes
        super().keep(job)
        if full:
            for state in self.pinned_keys.values():
                state[:] = state[BLOCK:] + state[:BLOCK]


@breaks(
    "adapters_are_bound_and_pinned_again_and_again",
    "https://github.com/vllm-project/vllm/issues/54839",
)
class PinsOfRemovedAdaptersStay(WorkingEngine):
    """Removing an adapter leaves its pinned contexts in their places."""

    def forget(self, adapter):
        pinned = dict(self.pinned_keys)
        super().forget(adapter)
        self.pinned_keys = pinned
