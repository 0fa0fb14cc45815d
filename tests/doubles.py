"""Engines, wrappers and an error that several tests of the core take."""

from __future__ import annotations

import asyncio
import queue

import torch

from genlm.core import Answer, hookimpl
from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, hashed_row
from genlm.core.types import SampleRequest

from .conftest import PATIENCE


class Unshowable(Exception):
    """An object, such as an error, whose text cannot be shown."""

    def __str__(self):
        raise RuntimeError("cannot be shown")

    __repr__ = __str__


class Processor:
    """Changes rows by a function."""

    def __init__(self, change):
        self.change = change

    @hookimpl
    def genlm_process_logprobs(self, queries, rows):
        return self.change(queries, rows)


class Plain:
    """An engine with nothing but rows."""

    tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        return torch.stack([row_of(*query.token_ids) for query in queries])


def row_of(*token_ids):
    return hashed_row(token_ids, None, 258)


def result_of(request):
    if isinstance(request, SampleRequest):
        return [1] * request.params.max_tokens
    return row_of(*request.token_ids)


class Elsewhere:
    """An engine whose work happens elsewhere: ``genlm_step`` waits for :meth:`finish`, or is
    woken."""

    tokenizer, vocab_size, max_context, device, model = ByteTokenizer(), 258, None, "cpu", None

    def __init__(self):
        self.in_flight = {}
        self.steps = queue.SimpleQueue()  # for each step, the admitted and the dropped requests
        self.cleared = 0
        self._events = queue.SimpleQueue()

    @hookimpl
    def genlm_step(self, queries, samples, dropped):
        for request in dropped:
            del self.in_flight[request]
        new_requests = [*queries, *samples]
        self.in_flight.update(dict.fromkeys(new_requests))
        self.steps.put((new_requests, list(dropped)))
        happened = self._events.get(timeout=PATIENCE)
        if happened is None:  # the step was woken
            return []
        if isinstance(happened, Exception):
            self.in_flight.clear()
            raise happened
        finished, self.in_flight = self.in_flight, {}
        return [Answer(request, result_of(request)) for request in finished]

    @hookimpl
    def genlm_wake(self):
        self._events.put(None)

    @hookimpl
    def genlm_clear_kv_cache(self):
        assert not self.in_flight
        self.cleared += 1

    # --- for the test -----------------------------------------------------------------------------

    def finish(self):
        """Answer everything in the step under way."""
        self._events.put("finished")

    def fail(self, error):
        self._events.put(error)

    def next_step(self):
        return self.steps.get(timeout=PATIENCE)

    async def step_with(self, what):
        """The requests of the next step that admits (0) or drops (1) any."""
        while True:
            step = await asyncio.to_thread(self.next_step)
            if step[what]:
                return step[what]


def padded(engine, size):
    """An engine of this class whose rows differ in size from its tokenizer's vocabulary."""
    made = engine(ByteTokenizer())
    made.vocab_size = size
    return made


class Reducing(ContinuousMockEngine):
    """A continuous mock that applies functions of rows itself, as an engine does whose rows are
    elsewhere."""

    def __init__(self, **options):
        super().__init__(ByteTokenizer(), **options)

    @hookimpl
    def genlm_step(self, queries, samples, scores, reductions, dropped):
        return self.advance([*queries, *samples, *scores, *reductions], dropped)
