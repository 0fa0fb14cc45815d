"""A sound continuous engine, made as real ones are: places in a batch, prompts in chunks, state for
each position, one token of each sample in a step.

What a row is comes from the hash of the mock, but of what the state holds, not of what was asked.
So whatever is lost, mixed up or left behind on the way shows in the row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, evolve

from genlm.core import Adapter, Answer, Query, hookimpl
from genlm.core.drawer import TokenDrawer
from genlm.core.mock import MockEngine
from genlm.core.types import Request, SampleRequest, ScoreRequest, query_of
from genlm.kit.prefixes import key_of, shared_length


@define(eq=False)
class Job:
    """The state of one request in the batch. A real engine keeps it in arrays, with an entry for
    each request."""

    request: Request
    tokens: list[int]  # The prompt, then the tokens that are scored or were drawn.
    prompt: int  # How many of these tokens are the prompt.
    adapter: Adapter | None
    drawer: TokenDrawer | None = None
    stops: frozenset[int] = frozenset()
    most: int = 0
    scores: list[float] | None = None
    state: list[int] = []  # noqa: RUF008  (always given: of the tokens that have been computed)

    @property
    def drawn(self) -> list[int]:
        return self.tokens[self.prompt :]


class WorkingEngine(MockEngine):
    """The engine.

    Attributes:
        places: How many requests run at once; the others wait in the order asked.
        chunk: How many tokens one step computes.
        room: How many positions there are. Where they run out, the job that was admitted last is
            set back.
        prefixes: How many contexts are kept for those that extend them.
        pins: How many may be pinned.
    """

    usual_context = 1024
    places = 64
    chunk = 256
    room = 8192
    prefixes = 32
    pins = 256

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waiting: list[Job] = []
        self.batch: list[Job] = []
        self.kept: OrderedDict[bytes, list[int]] = OrderedDict()
        self.pinned_keys: dict[bytes, list[int]] = {}

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
    ) -> list[Answer]:
        if queries and queries[0].cold:
            self._obey(queries)
            return [Answer(queries[0], self.row(queries[0]))]
        for request in dropped:
            self.drop(request)
        self.waiting += [self.job_of(request) for request in [*queries, *samples, *scores]]
        return self.step()

    def step(self) -> list[Answer]:
        self.admit()
        try:
            self._obey([query_of(job.request) for job in self.batch])
        except Exception:
            self.batch, self.waiting = [], []
            raise
        return self.compute()

    def job_of(self, request: Request) -> Job:
        query = query_of(request)
        job = Job(request, list(query.token_ids), query.length, query.adapter, state=[])
        if isinstance(request, SampleRequest):
            job.drawer = TokenDrawer(request.params)
            job.stops, job.most = request.params.stop_token_ids, request.params.max_tokens
        elif isinstance(request, ScoreRequest):
            job.tokens += request.continuation[:-1]
            job.scores = []
        return job

    # --- scheduling -------------------------------------------------------------------------------

    def admit(self) -> None:
        while self.waiting and len(self.batch) < self.places:
            if self.batch and self.used() + len(self.waiting[0].tokens) > self.room:
                break
            self.place(self.waiting.pop(0))

    def used(self) -> int:
        return sum(len(job.tokens) for job in self.batch)

    def place(self, job: Job) -> None:
        """A job starts from the longest beginning of it that is known."""
        key = self.key(job.adapter, job.tokens)
        found = {**self.kept, **self.pinned_keys}
        known, state = max(
            ((shared_length(key, other), state) for other, state in found.items()),
            key=lambda one: one[0],
            default=(0, []),
        )
        # The last token is always computed, and so are all tokens that are scored.
        job.state = state[: min(known, len(job.tokens) - 1, job.prompt - 1)]
        self.batch.append(job)

    def drop(self, request: Request) -> None:
        self.waiting = [job for job in self.waiting if job.request != request]
        for at, job in enumerate(self.batch):
            if job.request == request:
                self.leave(at)
                return

    def leave(self, at: int) -> None:
        """A job leaves the batch: the last one takes its place."""
        last = len(self.batch) - 1
        if at < last:
            self.move(last, at)
        self.batch.pop()

    def move(self, source: int, target: int) -> None:
        self.batch[target] = evolve(self.batch[source])

    def set_back(self, job: Job) -> None:
        """A job gives its room to others, and begins again when there is some."""
        again = evolve(job, state=[], scores=None if job.scores is None else [])
        self.waiting.insert(0, again)

    # --- computing --------------------------------------------------------------------------------

    def compute(self) -> list[Answer]:
        room = self.chunk
        answers: list[Answer] = []
        finished: list[int] = []
        for at in self.order():
            job = self.batch[at]
            size = min(room, len(job.tokens) - len(job.state))
            if size <= 0:
                continue
            room -= size
            self.advance(job, size)
            if len(job.state) == len(job.tokens) and self.ends(job, answers):
                finished.append(at)
        for at in sorted(finished, reverse=True):
            self.keep(self.batch[at])
            self.leave(at)
        while len(self.batch) > 1 and self.used() > self.room:
            self.set_back(self.batch.pop())
        return answers

    def order(self) -> list[int]:
        return list(range(len(self.batch)))

    def advance(self, job: Job, size: int) -> None:
        begin = len(job.state)
        job.state += job.tokens[begin : begin + size]
        if job.scores is not None:
            assert isinstance(job.request, ScoreRequest)
            for position in range(max(begin, job.prompt - 1), len(job.state)):
                target = job.request.continuation[position - job.prompt + 1]
                job.scores.append(float(self.row_at(job, position + 1)[target]))

    def ends(self, job: Job, answers: list[Answer]) -> bool:
        """Use the row after a job's tokens; whether it is finished."""
        if job.scores is not None:
            answers.append(Answer(job.request, torch.tensor(job.scores)))
            return True
        row = self.row_at(job, len(job.tokens))
        if job.drawer is None:
            answers.append(Answer(job.request, row))
            return True
        token = job.drawer.draw(row)
        if token not in job.stops:
            job.tokens.append(token)
            if len(job.drawn) < job.most:
                return False
        answers.append(Answer(job.request, job.drawn))
        return True

    def row_at(self, job: Job, length: int) -> torch.Tensor:
        return self.row(Query(tuple(job.state[:length]), job.adapter))

    # --- kept state -------------------------------------------------------------------------------

    def keep(self, job: Job) -> None:
        """Jobs that extend a finished one start from its state."""
        self.kept[self.key(job.adapter, job.tokens[: len(job.state)])] = job.state
        while len(self.kept) > self.prefixes:
            self.kept.popitem(last=False)

    def key(self, adapter: Adapter | None, tokens: Sequence[int]) -> bytes:
        return key_of(0 if adapter is None else adapter.version, tokens)

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        if len(self.pinned_keys) >= self.pins:
            raise RuntimeError(f"{self.pins} contexts are pinned already")
        self.pinned_keys[self.key(query.adapter, query.token_ids)] = list(query.token_ids)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self.kept.clear()
        self.pinned_keys.clear()

    @hookimpl
    def genlm_remove_lora(self, adapter: Adapter) -> bool:
        self.forget(adapter)
        return super().genlm_remove_lora(adapter)

    def forget(self, adapter: Adapter) -> None:
        header = self.key(adapter, ())
        for kept in (self.kept, self.pinned_keys):
            for key in [key for key in kept if key.startswith(header)]:
                del kept[key]
