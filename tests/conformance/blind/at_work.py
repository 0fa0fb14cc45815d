"""Mutants of a continuous engine: what breaks where requests meet. Written before the clauses on
schedules.

Each cites a thread that reports the bug, or one of its kind.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from attrs import evolve

from genlm.core import Adapter, Answer, hookimpl
from genlm.core.types import Request, query_of

from .common import Keeping, Mutants
from .working_engine import BLOCK, Job, WorkingEngine

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in

# --- what a place in the batch holds ----------------------------------------------------------


@seen_in("https://github.com/tenstorrent/tt-metal/issues/46350")
class GeneratorsDoNotMoveUp(WorkingEngine):
    """A draw that takes another one's place goes on with that one's random numbers."""

    def move(self, source, target):
        drawer = self.batch[target].drawer
        super().move(source, target)
        if drawer is not None and self.batch[target].drawer is not None:
            self.batch[target].drawer = drawer


@seen_in("https://github.com/vllm-project/vllm/pull/51890")
class AdapterStaysWithThePlace(WorkingEngine):
    """A draw that takes the place of another is drawn to its end with that one's adapter."""

    def move(self, source, target):
        adapter = self.batch[target].adapter
        super().move(source, target)
        self.batch[target].adapter = adapter


# --- requests that are cancelled --------------------------------------------------------------


@seen_in("https://github.com/raullenchai/Rapid-MLX/issues/1759")
class PlaceLeaksWithADroppedDraw(WorkingEngine):
    """A draw that has begun and is dropped keeps its place for ever."""

    def drop(self, request):
        if any(job.request is request and job.drawn for job in self.batch):
            self.places -= 1
        super().drop(request)


class Half(WorkingEngine):
    """Calls :meth:`half` when a prompt is dropped that has been computed in part."""

    def drop(self, request: Request) -> None:
        for job in self.batch:
            if job.request == request and 0 < job.computed < job.prompt:
                self.half(job)
        super().drop(request)

    def half(self, job: Job) -> None:
        raise NotImplementedError


@seen_in("https://github.com/vllm-project/vllm/pull/14875")
class ScoresOfADroppedPrompt(WorkingEngine):
    """The scores of a continuation that is dropped half-way go to the next one."""

    begun: list[float] | None = None

    def drop(self, request):
        for job in self.batch:
            if job.request is request and job.scores:
                self.begun = job.scores
        super().drop(request)

    def place(self, job):
        super().place(job)
        if job.scores is not None and self.begun:
            most = len(job.tokens) - job.prompt + 1
            job.scores, self.begun = self.begun[: most - 1], None

    def ends(self, at, job, answers):
        if job.scores is not None:
            job.scores = job.scores[: len(job.tokens) - job.prompt + 1]
        return super().ends(at, job, answers)


@seen_in("https://github.com/vllm-project/vllm/pull/29987")
class LeavesTwice(WorkingEngine):
    """A draw that is dropped in the step in which it ends leaves twice, the second time with the
    one that has taken its place."""

    def drop(self, request):
        for at, job in enumerate(self.batch):
            if job.request is request and job.drawer and len(job.drawn) + 1 == job.most:
                super().drop(request)
                if at < len(self.batch):
                    self.leave(at)
                return
        super().drop(request)


@seen_in("https://github.com/waybarrios/vllm-mlx/pull/769")
class DeclinedTakesAnotherWithIt(WorkingEngine):
    """Declined draws leave first; then those that have ended, by the places that they had
    before."""

    def declines(self, job):
        return job.params is not None and job.params.top_p is not None

    def finish(self, finished):
        declined = [at for at in finished if self.declines(self.batch[at])]
        if not declined:
            super().finish(finished)
            return
        ended = [self.batch[at] for at in finished if at not in declined]
        for at in reversed(declined):
            self.give_back(self.batch.pop(at))
        for at in sorted({*finished} - {*declined}, reverse=True):
            if at < len(self.batch):
                self.leave(at)
        for job in ended:  # it was answered
            if job in self.batch:
                self.leave(self.batch.index(job))


# --- whose turn it is -------------------------------------------------------------------------


@seen_in("https://github.com/sgl-project/sglang/issues/32549")
class EightShortestRun(WorkingEngine):
    """In every step the eight shortest run."""

    def order(self):
        return sorted(super().order(), key=lambda at: len(self.batch[at].tokens))[:8]


@seen_in("https://github.com/ggml-org/llama.cpp/issues/15008")
class DeferredBehindNewcomers(WorkingEngine):
    """Of eight places, one that is free goes to a newcomer before those who wait."""

    places = 8

    def enter(self, newcomers):
        self.waiting = newcomers + self.waiting


class Woken(Keeping, WorkingEngine, bell=threading.Event):
    """A sound engine whose step ends when something is finished, or when it is woken."""

    @hookimpl
    def genlm_wake(self) -> None:
        self.bell.set()

    def step(self) -> list[Answer]:
        while True:
            answers = super().step()
            if answers or not (self.batch or self.waiting) or self.woken():
                return answers

    def woken(self) -> bool:
        if self.bell.is_set():
            self.bell.clear()
            return True
        return False


@seen_in("https://github.com/vllm-project/vllm/issues/17972")
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


# --- what is kept -----------------------------------------------------------------------------


@seen_in("https://github.com/karpathy/nanochat/issues/187")
class TablesGrowByTheirFirstColumns(WorkingEngine):
    """When a ninth, a 17th or a 33rd request runs, the tables grow, and 256 columns are copied."""

    def place(self, job):
        if len(self.batch) in (8, 16, 32):
            for other in self.batch:
                for block in other.table[256 // BLOCK :]:
                    self.store[block] = [0] * BLOCK
        super().place(job)


@seen_in("https://github.com/EricLBuehler/mistral.rs/pull/917")
class KeptTablesGrowByTheirFirstColumns(WorkingEngine):
    """The same of the contexts that are kept."""

    prefixes = 64

    def keep(self, job):
        if len(self.kept) in (8, 16, 32):
            for state in self.kept.values():
                state[256:] = [0] * len(state[256:])
        super().keep(job)


@seen_in("https://github.com/ggml-org/llama.cpp/issues/12253")
class PinnedAreNotMoved(WorkingEngine):
    """When kept contexts make room, the others move up by a block; the pinned ones are
    forgotten."""

    def keep(self, job):
        full = len(self.kept) == self.prefixes
        super().keep(job)
        if full:
            for state in self.pinned_keys.values():
                state[:] = state[BLOCK:] + state[:BLOCK]


@seen_in("https://github.com/vllm-project/vllm/issues/54839")
class PinsOfRemovedAdaptersStay(WorkingEngine):
    """Removing an adapter leaves its pinned contexts in their places."""

    def forget(self, adapter):
        pinned = dict(self.pinned_keys)
        super().forget(adapter)
        self.pinned_keys = pinned


# --- long continuations, long contexts --------------------------------------------------------


@seen_in("https://github.com/vllm-project/vllm/pull/29216")
class ScoresFromAHundredOn(WorkingEngine):
    """From position 100 of a continuation on, the score is that of the token before."""

    def target(self, number):
        return number - (number >= 100)


@seen_in("https://github.com/huggingface/transformers/issues/37574")
class DrawsInARingOf128(WorkingEngine):
    """Tokens that are drawn are written into a ring of 128."""

    def output(self, job):
        ring = [0] * 128
        for at, token in enumerate(job.drawn):
            ring[at % 128] = token
        return [ring[at % 128] for at in range(len(job.drawn))]


@seen_in("https://github.com/kvcache-ai/ktransformers/issues/73")
class PositionsEndAt512(WorkingEngine):
    """Positions are clamped to 511, in cold rows too: beyond it the order of tokens is lost."""

    def row(self, query):
        ids = query.token_ids
        if len(ids) > 512:
            query = evolve(query, token_ids=(*ids[:511], *sorted(ids[511:])))
        return super().row(query)


# --- adapters ---------------------------------------------------------------------------------


@seen_in("https://github.com/ml-explore/mlx-lm/issues/1776")
class AdaptersOfAllModelsByName(WorkingEngine):
    """The adapters of all models of the process are in one table, by name."""

    loaded: ClassVar[dict[str, Adapter]] = {}

    @hookimpl
    def genlm_add_lora(self, adapter):
        self.loaded[adapter.name] = adapter
        return super().genlm_add_lora(adapter)

    def row(self, query):
        if query.adapter is not None:
            query = evolve(query, adapter=self.loaded[query.adapter.name])
        return super().row(query)


@seen_in("https://github.com/vllm-project/vllm/issues/42633")
class NameOfARemovedAdapter(Keeping, WorkingEngine, by_name=dict, current=dict):
    """An adapter that is removed leaves its weights under its name, for the next of that name."""

    @hookimpl
    def genlm_add_lora(self, adapter):
        if adapter.name in self.current:  # bound anew
            self.by_name[adapter.name] = adapter
        self.current[adapter.name] = adapter
        self.by_name.setdefault(adapter.name, adapter)
        return super().genlm_add_lora(adapter)

    @hookimpl
    def genlm_remove_lora(self, adapter):
        if self.current[adapter.name] == adapter:
            del self.current[adapter.name]
        return super().genlm_remove_lora(adapter)

    def row(self, query):
        if query.adapter is not None and query.adapter == self.current.get(query.adapter.name):
            query = evolve(query, adapter=self.by_name[query.adapter.name])
        return super().row(query)


# --- written after the clauses on schedules, before any was run on them -----------------------


@seen_in("https://github.com/vllm-project/vllm/pull/14875")
class SetBackScoreSkipsWhatItHad(WorkingEngine):
    """Where memory runs out a score is set back; computed again, it keeps the scores it had, and
    the others follow them."""

    blocks = 96

    def set_back(self, at):
        scores = self.batch[at].scores
        super().set_back(at)
        if scores is not None:
            self.waiting[0].scores = scores

    def ends(self, at, job, answers):
        if job.scores is not None:
            job.scores = job.scores[: len(job.tokens) - job.prompt + 1]
        return super().ends(at, job, answers)


@seen_in("https://github.com/vllm-project/vllm/issues/23697")
class AbortMeetsTheSameRequestAgain(WorkingEngine):
    """A request that is dropped takes an equal one with it that waits."""

    def drop(self, request):
        super().drop(request)
        query = query_of(request)
        self.waiting = [job for job in self.waiting if query_of(job.request) != query]
