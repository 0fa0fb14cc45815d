"""A sound continuous engine, made as real ones are: places in a batch, prompts in chunks, key/value
state in blocks, one token of each draw in a step.

What a row is comes from the hash of the mock, but of what the blocks hold, not of what was asked.
So
whatever is lost, mixed up or left behind on the way shows in the row.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import define, evolve

from genlm.core import Adapter, Answer, Query, hookimpl
from genlm.core.mock import MockEngine
from genlm.core.sampling import TokenDrawer
from genlm.core.types import Request, SampleRequest, SamplingParams, ScoreRequest, query_of
from genlm.kit.prefixes import key_of, shared_length

BLOCK = 16


@define(eq=False)
class Job:
    """What the batch knows of one request. An engine has these in arrays, one place for each."""

    request: Request
    tokens: list[int]  # of the prompt, then of what is scored or was drawn
    prompt: int  # how many of them are the prompt
    adapter: Adapter | None
    params: SamplingParams | None = None
    drawer: TokenDrawer | None = None
    stops: frozenset[int] = frozenset()
    most: int = 0
    scores: list[float] | None = None
    table: list[int] = []  # noqa: RUF008  (always given: the blocks, in order)
    computed: int = 0

    @property
    def drawn(self) -> list[int]:
        return self.tokens[self.prompt :]


class WorkingEngine(MockEngine):
    """The engine.

    Attributes:
        places: How many requests run at once; the others wait in the order asked.
        chunk: How many tokens one step computes.
        blocks: How many blocks there are. Where they run out, the job that was admitted last is set
            back.
        prefixes: How many contexts are kept for those that extend them.
        pins: How many may be pinned.
    """

    places = 64
    chunk = 256
    blocks = 512
    prefixes = 32
    pins = 256

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.waiting: list[Job] = []
        self.batch: list[Job] = []
        self.store: list[list[int]] = [[0] * BLOCK for _ in range(self.blocks)]
        self.free = list(range(self.blocks - 1, -1, -1))
        self.kept: OrderedDict[bytes, list[int]] = OrderedDict()
        self.pinned_keys: dict[bytes, list[int]] = {}

    # --- a step -----------------------------------------------------------------------------------

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
            return [Answer(queries[0], self.cold_row(queries[0]))]
        for request in dropped:
            self.drop(request)
        self.enter([self.job_of(request) for request in [*queries, *samples, *scores]])
        return self.step()

    def enter(self, newcomers: list[Job]) -> None:
        self.waiting += newcomers

    def step(self) -> list[Answer]:
        self.admit()
        try:
            self._obey([query_of(job.request) for job in self.batch])
        except Exception:
            self.lose_all()
            raise
        return self.compute()

    def job_of(self, request: Request) -> Job:
        query = query_of(request)
        job = Job(request, list(query.token_ids), len(query.token_ids), query.adapter, table=[])
        if isinstance(request, SampleRequest):
            job.params = request.params
            job.drawer = TokenDrawer(request.params)
            job.stops, job.most = request.params.stop_token_ids, request.params.max_tokens
        elif isinstance(request, ScoreRequest):
            job.tokens += request.continuation[:-1]
            job.scores = []
        return job

    def cold_row(self, query: Query) -> torch.Tensor:
        return self.row(query)

    def lose_all(self) -> None:
        for job in self.batch:
            self.give_back(job)
        self.batch, self.waiting = [], []

    # --- who runs ---------------------------------------------------------------------------------

    def admit(self) -> None:
        while self.waiting and len(self.batch) < self.places:
            job = self.waiting[0]
            if self.needed(job) > len(self.free):
                break
            del self.waiting[0]
            self.place(job)

    def needed(self, job: Job) -> int:
        return -(-(len(job.tokens) + 1) // BLOCK) - len(job.table)

    def place(self, job: Job) -> None:
        job.table += [self.free.pop() for _ in range(self.needed(job))]
        self.batch.append(job)
        self.start_from_what_is_known(job)

    def start_from_what_is_known(self, job: Job) -> None:
        key = self.key(job.adapter, job.tokens)
        found = {**self.kept, **self.pinned_keys}
        known, state = max(
            ((shared_length(key, other), state) for other, state in found.items()),
            key=lambda one: one[0],
            default=(0, []),
        )
        # At least the last token is computed, and whatever is scored.
        known = min(known, len(job.tokens) - 1, job.prompt - 1)
        self.write(job, 0, state[:known])
        job.computed = known

    def drop(self, request: Request) -> None:
        for job in list(self.waiting):
            if job.request is request or job.request == request:
                self.waiting.remove(job)
        for at, job in enumerate(self.batch):
            if job.request is request or job.request == request:
                self.leave(at)
                return

    def leave(self, at: int) -> None:
        """A job leaves the batch: the last one takes its place."""
        self.give_back(self.batch[at])
        last = len(self.batch) - 1
        if at < last:
            self.move(last, at)
        self.batch.pop()

    def move(self, source: int, target: int) -> None:
        self.batch[target] = evolve(self.batch[source])

    def give_back(self, job: Job) -> None:
        self.free += job.table
        job.table = []

    def set_back(self, at: int) -> None:
        """A job gives its blocks to others, and begins again when there are some."""
        job = self.batch[at]
        again = evolve(job, table=[], computed=0, scores=None if job.scores is None else [])
        self.leave(at)
        self.waiting.insert(0, again)

    # --- what is computed -------------------------------------------------------------------------

    def compute(self) -> list[Answer]:
        room = self.chunk
        answers: list[Answer] = []
        finished: list[int] = []
        for at in self.order():
            job = self.batch[at]
            size = min(room, len(job.tokens) - job.computed)
            if size <= 0:
                continue
            room -= size
            self.advance(job, job.computed + size)
            if job.computed == len(job.tokens) and self.ends(at, job, answers):
                finished.append(at)
        self.finish(finished)
        self.make_room()
        return answers

    def order(self) -> list[int]:
        return list(range(len(self.batch)))

    def advance(self, job: Job, stop: int) -> None:
        begin, job.computed = job.computed, stop
        self.write(job, begin, job.tokens[begin:stop])
        if job.scores is not None:
            assert isinstance(job.request, ScoreRequest)
            for position in range(max(begin, job.prompt - 1), stop):
                target = job.request.continuation[self.target(position - job.prompt + 1)]
                job.scores.append(float(self.row_at(job, position + 1)[target]))

    def target(self, number: int) -> int:
        return number

    def ends(self, at: int, job: Job, answers: list[Answer]) -> bool:
        """Use the row after a job's tokens; whether it is finished."""
        if job.scores is not None:
            answers.append(Answer(job.request, torch.tensor(job.scores)))
            return True
        row = self.row_at(job, len(job.tokens))
        if job.drawer is None:
            answers.append(Answer(job.request, row))
            return True
        if self.declines(job):
            answers.append(Answer(job.request, None))
            return True
        token = self.draw(job, row)
        if token not in job.stops:
            job.tokens.append(token)
            if len(job.drawn) < job.most:
                return False
        answers.append(Answer(job.request, self.output(job)))
        return True

    def draw(self, job: Job, row: torch.Tensor) -> int:
        assert job.drawer is not None
        return job.drawer.draw(row)

    def output(self, job: Job) -> list[int]:
        return job.drawn

    def declines(self, job: Job) -> bool:
        return False

    def finish(self, finished: list[int]) -> None:
        for at in sorted(finished, reverse=True):
            self.keep(self.batch[at])
            self.leave(at)

    def keep(self, job: Job) -> None:
        """What a finished job has computed serves those that extend it."""
        self.kept[self.key(job.adapter, job.tokens[: job.computed])] = self.read(job, job.computed)
        while len(self.kept) > self.prefixes:
            self.kept.popitem(last=False)

    def make_room(self) -> None:
        at = 0
        while at < len(self.batch):
            job = self.batch[at]
            if self.needed(job) <= 0:
                at += 1
            elif self.free:
                job.table.append(self.free.pop())
                at += 1
            else:
                self.set_back(len(self.batch) - 1)

    # --- state ------------------------------------------------------------------------------------

    def key(self, adapter: Adapter | None, tokens: Sequence[int]) -> bytes:
        return key_of(0 if adapter is None else adapter.version, tokens)

    def places_of(self, job: Job, begin: int, stop: int) -> Iterator[tuple[int, int]]:
        for position in range(begin, stop):
            yield job.table[position // BLOCK], position % BLOCK

    def write(self, job: Job, begin: int, tokens: Sequence[int]) -> None:
        for token, (block, at) in zip(
            tokens, self.places_of(job, begin, begin + len(tokens)), strict=True
        ):
            self.store[block][at] = token

    def read(self, job: Job, stop: int) -> list[int]:
        whole = [token for block in job.table[: -(-stop // BLOCK)] for token in self.store[block]]
        return whole[:stop]

    def row_at(self, job: Job, length: int) -> torch.Tensor:
        return self.row(Query(tuple(self.read(job, length)), job.adapter))

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
