"""Further mutants of a continuous engine: what breaks where requests meet. Written after the
clauses on schedules, and before any clause was run on them.

Each cites a thread that reports the bug, or one of its kind.
"""

from __future__ import annotations

from attrs import evolve

from genlm.core.types import SampleRequest, query_of

from .common import Mutants
from .working_engine import WorkingEngine

MUTANTS = Mutants()
seen_in = MUTANTS.seen_in


@seen_in("https://github.com/vllm-project/vllm/pull/14301")
class OneGreedyDrawMakesAllGreedy(WorkingEngine):
    """Where the first draw of the batch is greedy, all are."""

    def draw(self, job, row):
        first = next(one.params for one in self.batch if one.params)
        return int(row.argmax()) if first.temperature == 0 else super().draw(job, row)


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


@seen_in("https://github.com/ovg-project/kvcached/issues/401")
class DrawBesideARowOfItsPrompt(WorkingEngine):
    """A draw whose prompt is asked for a row in the same step takes the row's most likely token."""

    def draw(self, job, row):
        query = query_of(job.request)
        rows = [
            one
            for one in self.batch
            if not isinstance(one.request, SampleRequest) and query_of(one.request) == query
        ]
        return int(row.argmax()) if rows and not job.drawn else super().draw(job, row)


@seen_in("https://github.com/vllm-project/vllm/pull/51890")
class WhoWaitsGetsTheOptionsOfTheLast(WorkingEngine):
    """A draw that finds no place at once gets the options of the one that was admitted last."""

    def admit(self):
        super().admit()
        last = next((job.params for job in reversed(self.batch) if job.params), None)
        for at, job in enumerate(self.waiting):
            if job.params is not None and last is not None:
                options = evolve(last, seed=job.params.seed)
                drawer = type(job.drawer)(options) if job.drawer is not None else None
                self.waiting[at] = evolve(job, params=options, drawer=drawer)


@seen_in("https://github.com/vllm-project/vllm/pull/29216")
class ScoreBehindADrawIsOneOff(WorkingEngine):
    """Where a draw and a score share a step, the scores of later chunks are one position off."""

    def target(self, number):
        draws = any(job.params for job in self.batch)
        return number - (draws and number >= 16)
