"""What the engine thread does with a batch: look in the cache again, ask the engine, keep the
rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

from attrs import define, field

from genlm.core.adapters import AdapterRegistry
from genlm.core.cache import OutputCache
from genlm.core.checks import describe_error
from genlm.core.errors import EngineError, GenlmError
from genlm.core.logs import get_logger
from genlm.core.runtime.isolation import IsolatedSteps, Outcomes, evaluate_isolated
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.runtime.request_queue import ROWS, Lane
from genlm.core.runtime.timeline import Timeline
from genlm.core.types import Query, Request, SampleRequest, ScoreRequest, query_of

log = get_logger()

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
    """Written only by the engine thread."""

    cache_hits: int = 0  # of requests that the batcher has already counted
    batches: int = 0
    rows: int = 0
    draws: int = 0
    scores: int = 0
    largest_batch: int = 0
    failed_calls: int = 0

    def count(self, answers: Outcomes[Request, Result], in_flight: int) -> None:
        """Count the engine's answers. A declined request has ``None``."""
        if not answers:
            return
        self.batches += 1
        self.largest_batch = max(self.largest_batch, in_flight)
        for request, result in answers:
            if result is None or isinstance(result, Exception):
                continue
            if isinstance(request, Query):
                self.rows += 1
            elif isinstance(request, SampleRequest):
                self.draws += 1
            else:
                self.scores += 1


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
        """The lane of a request: all that the engine takes in its steps, or one kind for one call
        of a hook."""
        if isinstance(request, Query):
            return COLD if request.cold else ROWS
        if isinstance(request, SampleRequest):
            return ROWS if self.engine.in_steps("samples") else DRAWS
        return ROWS if self.engine.in_steps("scores") else SCORES

    def step(
        self, newcomers: Sequence[Request], dropped: Sequence[Request] = ()
    ) -> Outcomes[Request, Result]:
        """Answer what can be answered now. The newcomers are of one lane."""
        outcomes, askable = self._refuse_stale(newcomers)
        lane = self.lane(askable[0]) if askable else ROWS
        if lane is DRAWS or lane is SCORES:
            evaluate = self._sample if lane is DRAWS else self._score
            answered = evaluate_isolated(evaluate, askable)
        else:
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
        """The rows that are in the cache now; their queries are removed from ``requests``."""
        known: Outcomes[Request, Result] = []
        with self.timeline.stage("caching"):
            # Read first: what is dropped after this line must not be kept.
            generation = self.cache.generation
            for request in requests:
                if not isinstance(request, Query) or request.cold:
                    continue  # these are never kept
                # An equal request may have been answered after this one looked.
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
        return self._called(
            lambda: self.engine.step(queries, samples, scores, dropped), self._steps.in_flight
        )

    # --- batches ----------------------------------------------------------------------------------

    def _next_token_logprobs(self, queries: Sequence[Any]) -> list[Result]:
        return self._batch(queries, lambda: self.engine.next_token_logprobs(queries))

    def _sample(self, draws: Sequence[Any]) -> list[Result]:
        queries, params = [draw.query for draw in draws], [draw.params for draw in draws]
        return self._batch(draws, lambda: self.engine.sample(queries, params))

    def _score(self, requests: Sequence[Any]) -> list[Result]:
        queries, continuations = [r.query for r in requests], [r.continuation for r in requests]
        return self._batch(requests, lambda: self.engine.sequence_logprobs(queries, continuations))

    def _batch(
        self, requests: Sequence[Request], call: Callable[[], list[Any] | None]
    ) -> list[Result]:
        """The result of each request; ``None`` if the engine declines."""

        def answers() -> Outcomes[Request, Result]:
            results = call()
            return [
                *zip(requests, [None] * len(requests) if results is None else results, strict=True)
            ]

        return [result for _, result in self._called(answers, len(requests))]

    # --- both -------------------------------------------------------------------------------------

    def _called(
        self, call: Callable[[], Outcomes[Request, Result]], in_flight: int
    ) -> Outcomes[Request, Result]:
        """Call the engine, and count what it does."""
        began = self.timeline.clock()
        try:
            answers = call()
        except Exception as error:
            if not self.counters.failed_calls:
                what = describe_error(error)
                log.warning("engine.call_failed", backend=self.engine.backend, error=what)
            self.counters.failed_calls += 1
            raise
        self.counters.count(answers, in_flight)
        milliseconds = round((self.timeline.clock() - began) * 1e3, 3)
        log.debug("batch.evaluated", backend=self.engine.backend, n=in_flight, ms=milliseconds)
        return answers

    def _explained(self, query: Query, error: Exception) -> Exception:
        """The engine's error, with the query that caused it."""
        if isinstance(error, GenlmError):
            return error
        what = f"backend {self.engine.backend!r} failed on {query}"
        explained = EngineError(f"{what}: {describe_error(error)}")
        explained.__cause__ = error
        return explained
