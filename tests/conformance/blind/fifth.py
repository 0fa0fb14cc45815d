"""What an author of a backend may get wrong, once more written from the hooks and the mock alone:
habits that come with an engine's own generation, and tables of what is in flight."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from genlm.core.mock import ByteTokenizer, ContinuousMockEngine, MockEngine
from genlm.core.types import Query, SampleRequest, ScoreRequest, query_of

BEGIN, END = ByteTokenizer.bos_token_id, ByteTokenizer.eos_token_id


class AddsTheBeginning(MockEngine):
    """A text begins with its first token, so a context without it gets one."""

    reference = False

    def row(self, query):
        had = query.token_ids[0] == BEGIN
        return super().row(query if had else evolve(query, token_ids=(BEGIN, *query.token_ids)))


class TrimsPadding(MockEngine):
    """The end token is the padding token, and padding is found by value."""

    reference = False

    def row(self, query):
        ids = query.token_ids
        while len(ids) > 1 and ids[-1] == END:
            ids = ids[:-1]
        return super().row(evolve(query, token_ids=ids))


class SeedZeroIsNone(MockEngine):
    def _draw(self, query, params):
        return super()._draw(query, evolve(params, seed=params.seed or None))


class OneGenerator(MockEngine):
    """A seed sets the engine's one generator, from which draws without a seed go on."""

    random = np.random.default_rng()

    def _draw(self, query, params):
        if params.seed is not None:
            self.random = np.random.default_rng(params.seed)
        return super()._draw(query, evolve(params, seed=int(self.random.integers(2**62))))


class RepetitionPenalty(MockEngine):
    """The model's generation_config has one, and draws obey it."""

    def _draw(self, query, params):
        drawn = []
        while len(drawn) < params.max_tokens:
            row = self.row(query.extended(tuple(drawn))).clone()
            seen = sorted({*query.token_ids, *drawn})
            row[seen] = row[seen] * 1.1
            seed = None if params.seed is None else params.seed + len(drawn)
            one = MockEngine(self.tokenizer, row=lambda _, row=row: row.log_softmax(-1))
            token = one._draw(Query((0,)), evolve(params, seed=seed, max_tokens=1))
            if not token:
                break
            drawn += token
        return drawn


class DropsByTokens(ContinuousMockEngine):
    """A request that is dropped is found by its tokens, whatever its kind or adapter."""

    def advance(self, newcomers, dropped=()):
        gone = {query_of(request).token_ids for request in dropped}
        alike = [one for one in self._in_flight if query_of(one).token_ids in gone]
        return super().advance(newcomers, alike)


class NumbersOfSlots(ContinuousMockEngine):
    """A newcomer gets the number of requests in flight as its slot, which may be in use."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.slots = {}

    def advance(self, newcomers, dropped=()):
        for one in newcomers:
            self.slots[len(self.slots)] = one
        self.slots = {n: one for n, one in self.slots.items() if one not in dropped}
        keep = set(map(id, self.slots.values()))
        lost = [one for one in self._in_flight if id(one) not in keep and one not in dropped]
        new = [one for one in newcomers if id(one) in keep]
        answers = super().advance(new, [*dropped, *lost])
        done = {id(answer.request) for answer in answers}
        self.slots = {n: one for n, one in self.slots.items() if id(one) not in done}
        return answers


class ScoresOfOneAdapter(ContinuousMockEngine):
    """Scores that come in one step are made under the adapter of the first."""

    def advance(self, newcomers, dropped=()):
        scores = [one for one in newcomers if isinstance(one, ScoreRequest)]
        self.under = getattr(self, "under", {})
        self.under.update({id(one): scores[0].query.adapter for one in scores})
        return super().advance(newcomers, dropped)

    def _result(self, request):
        if isinstance(request, ScoreRequest):
            adapter = self.under.pop(id(request))
            request = evolve(request, query=evolve(request.query, adapter=adapter))
        return super()._result(request)


class StopsOfTheOldest(ContinuousMockEngine):
    """All draws in flight stop where the oldest of them does."""

    def _result(self, request):
        if isinstance(request, SampleRequest):
            draws = [one for one in self._in_flight if isinstance(one, SampleRequest)]
            stops = (draws or [request])[0].params.stop_token_ids
            return self._draw(request.query, evolve(request.params, stop_token_ids=stops))
        return super()._result(request)


class LongRowsInHalf(MockEngine):
    """Long contexts go another way, whose output is in half precision."""

    def row(self, query):
        row = super().row(query)
        return row if query.length < 200 else row.half().float().log_softmax(-1)


MUTANTS = (
    AddsTheBeginning, TrimsPadding, SeedZeroIsNone, OneGenerator, RepetitionPenalty, DropsByTokens,
    NumbersOfSlots, ScoresOfOneAdapter, StopsOfTheOldest, LongRowsInHalf,
)  # fmt: skip
