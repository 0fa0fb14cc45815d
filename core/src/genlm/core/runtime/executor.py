"""What the engine thread does with a batch: look in the cache once more, ask the engine, keep the
rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from attrs import define, field

from genlm.core.adapters import AdapterRegistry
from genlm.core.errors import EngineError, GenlmError
from genlm.core.logs import get_logger
from genlm.core.runtime.cache import OutputCache
from genlm.core.runtime.isolation import IsolatedSteps, Outcomes, evaluate_isolated
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.runtime.timeline import Timeline
from genlm.core.types import Query, Request, SampleRequest, ScoreRequest

if TYPE_CHECKING:
    import torch

log = get_logger()

T = TypeVar("T")


# A row for a Query; ids, or None, for a SampleRequest; scores, or None, for a ScoreRequest.
Result = Any


def kind_of(request: Request) -> Hashable:
    """What may share a batch: requests of one type; a cold query is alone."""
    return request if isinstance(request, Query) and request.cold else type(request).__name__


def query_of(request: Request) -> Query:
    return request if isinstance(request, Query) else request.query


def describe(request: Request) -> dict[str, Any]:
    """What a trace says of a request."""
    query = query_of(request)
    adapter = None if query.adapter is None else query.adapter.name
    return {"asked": type(request).__name__, "tokens": query.length, "adapter": adapter}


@define
class EngineCounters:
    """Written by the engine thread alone."""

    cache_hits: int = 0  # of questions that the batcher has counted already
    batches: int = 0
    rows: int = 0
    largest_batch: int = 0

    def count(self, queries: int, rows: int) -> None:
        self.batches += 1
        self.rows += rows
        self.largest_batch = max(self.largest_batch, queries)


@define(eq=False)
class EngineExecutor:
    """Drives one engine for the batcher. Everything here happens on the engine thread."""

    engine: LoadedEngine
    cache: OutputCache
    adapters: AdapterRegistry
    counters: EngineCounters
    timeline: Timeline
    _steps: IsolatedSteps[Query, torch.Tensor] = field(init=False)
    # Of the cache, when the query was admitted.
    _generation: dict[Query, int] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self._steps = IsolatedSteps(self._advance)

    def step(self, newcomers: Sequence[Request]) -> Outcomes[Request, Result]:
        """Answer what can be answered now. The newcomers are of one kind."""
        outcomes, askable = self._refuse_stale(newcomers)
        if askable and isinstance(askable[0], SampleRequest):
            outcomes += self._evaluate(self._sample, askable)
        elif askable and isinstance(askable[0], ScoreRequest):
            outcomes += self._evaluate(self._score, askable)
        else:
            outcomes += self._rows(cast("Sequence[Query]", askable))
        return outcomes

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

    def _rows(self, queries: Sequence[Query]) -> Outcomes[Request, Result]:
        outcomes: Outcomes[Request, Result] = []
        asked: list[Query] = []
        with self.timeline.stage("caching"):
            # Read first: what is dropped from here on must not be kept.
            generation = self.cache.generation
            for query in queries:
                # An equal question may have been answered since this one looked.
                row = None if query.cold else self.cache.get(query, counted=False)
                if row is None:
                    asked.append(query)
                    self._generation[query] = generation
                else:
                    self.counters.cache_hits += 1
                    outcomes.append((query, row))
        if self.engine.continuous:
            answered = self._steps.step(asked) if asked or self._generation else []
        else:
            answered = evaluate_isolated(self._next_token_logprobs, asked)
        with self.timeline.stage("caching"):
            return outcomes + [(query, self._finish(query, outcome)) for query, outcome in answered]

    def _finish(self, query: Query, outcome: torch.Tensor | Exception) -> Result:
        generation = self._generation.pop(query)
        if isinstance(outcome, Exception):
            return self._explained(query, outcome)
        if not query.cold:
            self.cache.put(query, outcome, generation)
        return outcome

    def _next_token_logprobs(self, queries: Sequence[Query]) -> list[torch.Tensor]:
        return self._counted(
            len(queries), len(queries), lambda: self.engine.next_token_logprobs(queries)
        )

    def _advance(self, queries: Sequence[Query]) -> Outcomes[Query, torch.Tensor]:
        return self._counted(len(self._generation), len(queries), lambda: self.engine.step(queries))

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

    def _counted(self, queries: int, rows: int, call: Callable[[], T]) -> T:
        began = self.timeline.clock()
        result = call()
        self.counters.count(queries, rows)
        milliseconds = round((self.timeline.clock() - began) * 1e3, 3)
        log.debug("batch.evaluated", backend=self.engine.backend, n=queries, ms=milliseconds)
        return result

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
            f"{type(error).__name__}: {error}"
        )
        explained.__cause__ = error
        return explained
