"""The work of the engine thread on a batch: look into the cache again, call the engine, and keep
the rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from attrs import define, field

from genlm.core.adapters import AdapterRegistry
from genlm.core.cache import OutputCache
from genlm.core.checks import describe_error, safe_repr
from genlm.core.errors import EngineDeadError, EngineError, GenlmError, PluginError
from genlm.core.logs import get_logger
from genlm.core.runtime.batcher import TryAlone
from genlm.core.runtime.frames import let_go
from genlm.core.runtime.lanes import ROWS, Counters, Lane
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.runtime.results import Answers, evaluate_isolated
from genlm.core.runtime.timeline import Timeline
from genlm.core.types import (
    Adapter,
    Query,
    ReductionRequest,
    Request,
    SampleRequest,
    ScoreRequest,
    query_of,
)

log = get_logger()

#: The lanes of cold queries, and of samples and scores that the engine does not take in its steps.
COLD, DRAWS, SCORES = Lane("cold rows", alone=True), Lane("draws"), Lane("scores")

#: The counter for each kind of answer.
KINDS: dict[type, str] = {
    Query: "rows",
    SampleRequest: "draws",
    ScoreRequest: "scores",
    ReductionRequest: "reductions",
}


@define(eq=False)
class EngineExecutor:
    """Drives one engine for the batcher, and binds its adapters. Everything here happens on the
    engine thread."""

    engine: LoadedEngine
    cache: OutputCache
    adapters: AdapterRegistry
    counters: Counters
    timeline: Timeline
    keeps_frames: bool = False
    # The requests in a continuous engine, each with the generation of the cache when it was
    # admitted.
    _in_flight: dict[Request, int] = field(init=False, factory=dict)
    # The message of the last failure of a step. The error itself would keep the step's tensors
    # alive.
    _failure: str = field(init=False, default="")
    _wake_failed: bool = field(init=False, default=False)
    # The pinned prompts, and whether a failed call may have made the engine forget them.
    _pinned: dict[Query, None] = field(init=False, factory=dict)
    _pins_lost: bool = field(init=False, default=False)

    @property
    def drops(self) -> bool:
        return self.engine.supports("genlm_step", "dropped")

    @property
    def wakes(self) -> bool:
        return self.engine.supports("genlm_wake")

    def lane(self, request: Request) -> Lane:
        """The lane of a request: one lane for everything that the engine takes in its steps, and
        one for each kind of request that has a hook of its own."""
        if isinstance(request, Query):
            return COLD if request.cold else ROWS
        if isinstance(request, ReductionRequest):
            return ROWS
        draw = isinstance(request, SampleRequest)
        hook = self.engine.native["samples" if draw else "scores"]
        return ROWS if hook == "genlm_step" else DRAWS if draw else SCORES

    def step(self, new_requests: Sequence[Request], dropped: Sequence[Request]) -> Answers[Request]:
        """Answer the requests that can be answered now. All new requests are of one lane."""
        if self._pins_lost:
            self._pin_again()
        began = self.timeline.clock()
        # Read first, because rows that are dropped from the cache after this line must not be kept.
        generation = self.cache.generation
        known, asked = self._without_engine(new_requests)
        self.timeline.add("caching", began)
        if self.engine.continuous and not (asked and self.lane(asked[0]) in (DRAWS, SCORES)):
            self._in_flight.update(dict.fromkeys(asked, generation))
            answers = self._advance(asked, dropped)
        else:
            answers = evaluate_isolated(self._batch, asked)
            self._keep(answers, generation)
        for i, (request, result) in enumerate(answers):
            if not isinstance(result, Exception):
                continue
            if not isinstance(request, ReductionRequest):
                answers[i] = request, self._explained(query_of(request), result)
            elif not self.keeps_frames:
                let_go(result)  # the function's own: its caller gets it as it is
        return known + answers

    def wake(self) -> None:
        """Make the current step return early, if the engine can. On any thread."""
        try:
            self.engine.calls.call("genlm_wake")
        except Exception as error:
            if not self._wake_failed:  # logged once, because it may fail in every step
                log.exception("engine.wake_failed", backend=self.engine.backend)
                owner = f"backend {self.engine.backend!r}"
                said = f"genlm_wake raised {describe_error(error)}, which it must not"
                with suppress(PluginError):  # the error does not concern the current callers
                    self.engine.results.tell(PluginError(f"{owner}: {said}"))
            self._wake_failed = True

    def close(self) -> None:
        self.engine.close()

    # --- rows that are known ----------------------------------------------------------------------

    def _without_engine(
        self, requests: Sequence[Request]
    ) -> tuple[Answers[Request], list[Request]]:
        """The answers that need no engine (rows that are in the cache now, errors for adapters that
        are removed), and the other requests."""
        known: Answers[Request] = []
        asked: list[Request] = []
        for request in requests:
            query = request if isinstance(request, Query) else request.query
            if query.adapter and (error := self.adapters.outdated(query.adapter)) is not None:
                known.append((request, error))
                continue
            row = None
            if query is request and not query.cold:
                # An equal request may have been answered since the first look-up.
                row = self.cache.peek(query, counted=False)
            if row is None:
                asked.append(request)
            else:
                self.counters["cache_hits"] += 1
                known.append((request, row))
        return known, asked

    def _keep(self, answers: Answers[Request], generation: int) -> None:
        """Keep rows in the cache, except cold ones."""
        if self.cache.maxsize == 0:
            return
        began = self.timeline.clock()
        rows = [
            (request, result)
            for request, result in answers
            if isinstance(request, Query) and not (request.cold or isinstance(result, Exception))
        ]
        try:
            self.cache.put(rows, generation)
        # There is no memory for the copies; the callers still get theirs.
        except Exception as error:
            log.warning("cache.rows_not_kept", rows=len(rows), error=describe_error(error))
        self.timeline.add("caching", began)

    # --- steps ------------------------------------------------------------------------------------

    def _advance(
        self, new_requests: Sequence[Request], dropped: Sequence[Request]
    ) -> Answers[Request]:
        """Make a step. If it raises, all that were in flight are tried again, each alone.

        Raises:
            EngineDeadError: the engine cannot continue.
            PluginError: it answered a request that is not in flight.
        """
        # Dropped and requested again at once, so the engine still has them.
        if dropped and (back := set(dropped).intersection(new_requests)):
            new_requests = [request for request in new_requests if request not in back]
            dropped = [request for request in dropped if request not in back]
        for request in dropped:
            self._in_flight.pop(request, None)
        if not (self._in_flight or dropped):
            return []
        of: dict[type[Request], list[Request]] = {kind: [] for kind in KINDS}
        for request in new_requests:
            of[type(request)].append(request)
        try:
            answers = self._called(
                "genlm_step",
                new_requests,
                # Tuples, because a hook could remove requests from a list, or sort it.
                queries=tuple(of[Query]),
                samples=tuple(of[SampleRequest]),
                scores=tuple(of[ScoreRequest]),
                reductions=tuple(of[ReductionRequest]),
                dropped=tuple(dropped),
                width=self.engine.width,
            )
        except (EngineDeadError, PluginError):
            raise
        except Exception as error:
            self._failure = describe_error(error)
            lost, self._in_flight = list(self._in_flight), {}
            if len(lost) == 1:
                return [(lost[0], self._explained(query_of(lost[0]), error))]
            return [(request, TryAlone()) for request in lost]
        finished: Answers[Request] = []
        # By the generation in which they were admitted.
        kept: dict[int, Answers[Request]] = defaultdict(list)
        for answer in answers:
            request = answer[0]
            admitted = self._in_flight.pop(request, None)
            if admitted is not None:
                finished.append(answer)
                kept[admitted].append(answer)
            elif request not in dropped:
                raise self._unasked(request)
        for generation, some in kept.items():
            self._keep(some, generation)
        return finished

    def _unasked(self, request: Request) -> PluginError:
        """The error for an answer to a request that is not in flight."""
        failed = f" (it did: {self._failure})" if self._failure else ""
        return PluginError(
            f"genlm_step answered a request that is not in flight, {safe_repr(request)}; answer "
            "every request once, and none that an earlier step got in `dropped`, or that was "
            f"admitted before genlm_step raised{failed}"
        )

    # --- batches ----------------------------------------------------------------------------------

    def _batch(self, requests: Sequence[Any]) -> Answers[Request]:
        """The result of each request, which are of one kind; ``None`` if the engine declines."""
        arguments: dict[str, Any]
        if isinstance(requests[0], Query):
            hook, arguments = "genlm_next_token_logprobs", {"queries": tuple(requests)}
        else:
            hook, arguments = "genlm_sample", {"queries": tuple(r.query for r in requests)}
            if isinstance(requests[0], SampleRequest):
                arguments["params"] = tuple(r.params for r in requests)
            else:
                hook = "genlm_sequence_logprobs"
                arguments["continuations"] = tuple(r.continuation for r in requests)
                arguments["width"] = self.engine.width
        return self._called(hook, requests, **arguments)

    # --- both -------------------------------------------------------------------------------------

    def _called(self, hook: str, requests: Sequence[Request], **arguments: Any) -> Answers[Request]:
        """Call an evaluation hook for new requests, and read its result."""
        began = self.timeline.clock()
        try:
            try:
                given, spoilt = self.engine.calls.evaluate(hook, arguments)
            finally:
                self.timeline.add("engine", began, requests=len(requests))
            ended = self.timeline.clock()
            answers = self.engine.results.read(hook, requests, given)
            self.timeline.add("alignment", ended)
        except Exception as error:
            if not self.counters["failed_calls"]:
                what = describe_error(error)
                log.warning("engine.call_failed", backend=self.engine.backend, error=what)
            self.counters["failed_calls"] += 1
            self._pins_lost = True
            raise
        self._count(answers, max(len(self._in_flight), len(requests)))
        return answers if spoilt is None else [(request, spoilt) for request, _ in answers]

    def _count(self, answers: Answers[Request], in_flight: int) -> None:
        """Count the engine's answers. A declined request has ``None``."""
        if answers:
            counters, failed = self.counters, (Exception, type(None))
            counters["batches"] += 1
            counters["largest_batch"] = max(counters["largest_batch"], in_flight)
            counters.update(
                [KINDS[type(asked)] for asked, given in answers if not isinstance(given, failed)]
            )

    def _explained(self, query: Query, error: Exception) -> Exception:
        """The engine's error, with the query that caused it."""
        if not self.keeps_frames:
            let_go(error)
        if isinstance(error, (GenlmError, TryAlone)):
            return error
        what = f"backend {self.engine.backend!r} failed on {query}"
        explained = EngineError(f"{what}: {describe_error(error)}")
        explained.__cause__ = error
        return explained

    # --- adapters and state -----------------------------------------------------------------------

    def bind(self, adapter: Adapter, contents: Any) -> None:
        """Load an adapter and bind it to its name. An adapter bound to the name before is
        removed."""
        self.engine.change("genlm_add_lora", adapter=adapter, contents=contents)
        old = self.adapters.bind(adapter)
        if old is not None:
            self._discard(old)

    def unbind(self, name: str) -> None:
        """Raises: UnknownAdapterError: the name is not bound."""
        self._discard(self.adapters.unbind(name))

    def _discard(self, adapter: Adapter) -> None:
        self.cache.drop(lambda query: cast(Query, query).adapter == adapter)
        self._pinned = {query: None for query in self._pinned if query.adapter != adapter}
        self.engine.change("genlm_remove_lora", adapter=adapter)

    def pin(self, query: Query) -> None:
        """Compute and pin the state of a prompt."""
        if (outdated := self.adapters.outdated(query.adapter)) is not None:
            raise outdated  # the adapter was removed while this call waited
        self._pin_again()
        self._pins_lost = True  # until the call has succeeded
        try:
            self.engine.change("genlm_cache_prefix", query=query)
        except GenlmError:
            raise
        except Exception as error:
            raise self._explained(query, error) from error
        self._pins_lost = False
        self._pinned[query] = None

    def _pin_again(self) -> None:
        """Pin prompts again that a failed call may have made the engine lose. A prompt that fails
        now is given up."""
        while self._pins_lost:
            self._pins_lost = False
            for query in list(self._pinned):
                try:
                    self.engine.change("genlm_cache_prefix", query=query)
                except EngineDeadError:
                    raise
                except Exception as error:
                    del self._pinned[query]
                    self._pins_lost = True
                    lost = describe_error(error)
                    log.warning("prefix.lost", tokens=query.length, error=lost)

    def clear(self) -> None:
        """Empty the KV cache, pinned prompts included."""
        self._pinned.clear()
        self.engine.calls.call("genlm_clear_kv_cache")
