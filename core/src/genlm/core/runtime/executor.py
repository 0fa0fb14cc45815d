"""What the engine thread does with a batch: look in the cache once more, ask the engine, keep the
rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import define, field

from genlm.core.adapters import AdapterRegistry
from genlm.core.checks import told
from genlm.core.errors import EngineError, GenlmError
from genlm.core.logs import get_logger
from genlm.core.runtime.cache import OutputCache
from genlm.core.runtime.isolation import IsolatedSteps, Outcomes, evaluate_isolated
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.runtime.request_queue import ROWS, Lane
from genlm.core.runtime.timeline import Timeline
from genlm.core.types import Query, Request, SampleRequest, ScoreRequest, query_of

if TYPE_CHECKING:
    import torch

log = get_logger()

T = TypeVar("T")


# A row for a Query; ids, or None, for a SampleRequest; scores, or None, for a ScoreRequest.
Result = Any

#: Cold queries, and draws and scores that the engine does not take in its steps.
COLD, DRAWS, SCORES = Lane("cold rows", alone=True), Lane("draws"), Lane("scores")


def describe(request: Request) -> dict[str, Any]:
    """What a trace says of a request."""
    query = query_of(request)
    adapter = None if query.adapter is None else query.adapter.name
    return {"asked": type(request).__name__, "tokens": query.length, "adapter": adapter}


@define
class EngineCounters:
    """Written by the engine thread alone."""

    cache_hits: int = 0  # of requests that the batcher has counted already
    batches: int = 0
    rows: int = 0
    largest_batch: int = 0

    def count(self, requests: int, rows: int) -> None:
        self.batches += 1
        self.rows += rows
        self.largest_batch = max(self.largest_batch, requests)


@define(eq=False)
class EngineExecutor:
    """Drives one engine for the batcher. Everything here happens on the engine thread."""

    engine: LoadedEngine
    cache: OutputCache
    adapters: AdapterRegistry
    counters: EngineCounters
    timeline: Timeline
    _steps: IsolatedSteps[Request, Result] = field(init=False)
    # Of the cache, when the query was admitted.
    _generation: dict[Query, int] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._steps = IsolatedSteps(self._advance, self.engine.drops)

    @property
    def drops(self) -> bool:
        return self.engine.drops

    def lane(self, request: Request) -> Lane:
        """What the request may be in flight with: what the engine takes in its steps, or in one
        call of one hook."""
        if isinstance(request, Query):
            return COLD if request.cold else ROWS
        if isinstance(request, SampleRequest):
            return ROWS if "samples" in self.engine.in_steps else DRAWS
        return ROWS if "scores" in self.engine.in_steps else SCORES

    def step(
        self, newcomers: Sequence[Request], dropped: Sequence[Request] = ()
    ) -> Outcomes[Request, Result]:
        """Answer what can be answered now. The newcomers are of one lane."""
        outcomes, askable = self._refuse_stale(newcomers)
        lane = self.lane(askable[0]) if askable else ROWS
        if lane is DRAWS:
            return outcomes + self._evaluate(self._sample, askable)
        if lane is SCORES:
            return outcomes + self._evaluate(self._score, askable)
        outcomes += self._known(askable)
        if self.engine.continuous:
            answered = self._advance_isolated(askable, dropped)
        else:
            answered = evaluate_isolated(self._next_token_logprobs, askable)
        with self.timeline.stage("caching"):
            return outcomes + [
                (request, self._finish(request, result)) for request, result in answered
            ]

    def wake(self) -> None:
        self.engine.wake()

    def close(self) -> None:
        self.engine.close()

    def _refuse_stale(
        self, newcomers: Sequence[Request]
    ) -> tuple[Outcomes[Request, Result], list[Request]]:
        outcomes: Outcomes[Request, Result] = []
        askable: list[Request] = []
        for request in newcomers:
            adapter = query_of(request).adapter
            try:
                if adapter is not None:
                    self.adapters.require_current(adapter)
                askable.append(request)
            except GenlmError as error:
                outcomes.append((request, error))
        return outcomes, askable

    # --- rows -------------------------------------------------------------------------------------

    def _known(self, requests: list[Request]) -> Outcomes[Request, Result]:
        """The rows that the cache has after all; their queries are removed from ``requests``."""
        known: Outcomes[Request, Result] = []
        with self.timeline.stage("caching"):
            # Read first: what is dropped from here on must not be kept.
            generation = self.cache.generation
            for request in requests:
                if not isinstance(request, Query) or request.cold:
                    continue  # these are never kept
                # An equal request may have been answered since this one looked.
                row = self.cache.get(request, counted=False)
                if row is None:
                    self._generation[request] = generation
                else:
                    self.counters.cache_hits += 1
                    known.append((request, row))
        if known:
            answered = {id(request) for request, _ in known}
            requests[:] = [request for request in requests if id(request) not in answered]
        return known

    def _finish(self, request: Request, outcome: Result | Exception) -> Result:
        generation = self._generation.pop(request, None) if isinstance(request, Query) else None
        if isinstance(outcome, Exception):
            return self._explained(query_of(request), outcome)
        if generation is not None:
            self.cache.put(cast(Query, request), outcome, generation)
        return outcome

    def _next_token_logprobs(self, requests: Sequence[Request]) -> list[torch.Tensor]:
        queries = cast("Sequence[Query]", requests)
        return self._counted(
            len(queries), len(queries), lambda: self.engine.next_token_logprobs(queries)
        )

    # --- steps ------------------------------------------------------------------------------------

    def _advance_isolated(
        self, newcomers: Sequence[Request], dropped: Sequence[Request]
    ) -> Outcomes[Request, Result]:
        for request in dropped:
            if isinstance(request, Query):
                self._generation.pop(request, None)
        return self._steps.step(newcomers, dropped)

    def _advance(
        self, newcomers: Sequence[Request], dropped: Sequence[Request]
    ) -> Outcomes[Request, Result]:
        queries = [request for request in newcomers if isinstance(request, Query)]
        samples = [request for request in newcomers if isinstance(request, SampleRequest)]
        scores = [request for request in newcomers if isinstance(request, ScoreRequest)]
        began = self.timeline.clock()
        answers = self.engine.step(queries, samples, scores, dropped)
        if answers:  # a step that finished nothing is not a batch
            rows = sum(isinstance(request, Query) for request, _ in answers)
            self._count(self._steps.in_flight, rows, began)
        return answers

    # --- everything else --------------------------------------------------------------------------

    def _evaluate(
        self, evaluate: Callable[[Sequence[Any]], Sequence[Result]], requests: Sequence[Request]
    ) -> Outcomes[Request, Result]:
        return [
            (
                request,
                self._explained(query_of(request), outcome)
                if isinstance(outcome, Exception)
                else outcome,
            )
            for request, outcome in evaluate_isolated(evaluate, requests)
        ]

    def _sample(self, draws: Sequence[SampleRequest]) -> Sequence[Result]:
        queries, params = [draw.query for draw in draws], [draw.params for draw in draws]
        drawn = self._counted(len(draws), 0, lambda: self.engine.sample(queries, params))
        return [None] * len(draws) if drawn is None else drawn

    def _score(self, requests: Sequence[ScoreRequest]) -> Sequence[Result]:
        queries, continuations = [r.query for r in requests], [r.continuation for r in requests]
        scores = self._counted(
            len(requests), 0, lambda: self.engine.sequence_logprobs(queries, continuations)
        )
        return [None] * len(requests) if scores is None else scores

    def _counted(self, requests: int, rows: int, call: Callable[[], T]) -> T:
        began = self.timeline.clock()
        result = call()
        self._count(requests, rows, began)
        return result

    def _count(self, requests: int, rows: int, began: float) -> None:
        self.counters.count(requests, rows)
        milliseconds = round((self.timeline.clock() - began) * 1e3, 3)
        log.debug("batch.evaluated", backend=self.engine.backend, n=requests, ms=milliseconds)

    def _explained(self, query: Query, error: Exception) -> Exception:
        """The engine's error, with the query that met it."""
        if isinstance(error, GenlmError):
            return error
        shown = ", ".join(map(str, query.token_ids[:8])) + (
            ", ..." if len(query.token_ids) > 8 else ""
        )
        adapter = f" with adapter {query.adapter.name!r}" if query.adapter else ""
        explained = EngineError(
            f"backend {self.engine.backend!r} failed on the context [{shown}] of "
            f"{len(query.token_ids)} tokens{adapter}: "
            f"{told(error)}"
        )
        explained.__cause__ = error
        return explained
