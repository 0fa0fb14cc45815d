"""The hooks, on top of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from genlm.core import (
    Answer,
    EngineDeadError,
    EngineError,
    Query,
    SamplingParams,
    hookimpl,
)
from genlm.core.logs import get_logger
from genlm.sgl.internals import Finished, Scheduler
from genlm.sgl.sampling import native_draw

log = get_logger()

#: A question that asks whether the scheduler still works.
PROBE = Query(token_ids=(0,), cold=True)


class SglEngine:
    """One model in SGLang's scheduler, which admits newcomers between its steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tokenizer = scheduler.tokenizer
        self.model = scheduler.model
        self.vocab_size = scheduler.vocab_size
        self.max_context: int | None = scheduler.longest_prompt
        self.device = str(next(self.model.parameters()).device)
        self._in_flight: dict[str, Query] = {}
        self._pinned: dict[Query, Any] = {}
        self._asked = 0

    # --- evaluation -------------------------------------------------------------------------------

    @hookimpl
    def genlm_step(self, queries: Sequence[Query]) -> list[Answer]:
        try:
            for query in queries:
                self._submit(query)
            return [
                Answer(query, end if isinstance(end, Exception) else end.row)
                for query, end in self._advance()
            ]
        except Exception:
            self._recover()
            raise

    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]] | None:
        draws = [native_draw(each, self.scheduler.stop_token_ids) for each in params]
        if None in draws or self.vocab_size > len(self.tokenizer):  # it would draw padding
            return None
        try:
            keys = [self._submit(query, draw) for query, draw in zip(queries, draws, strict=True)]
            drawn: dict[str, list[int]] = {}
            while len(drawn) < len(keys):
                for _, end in self._advance():
                    if isinstance(end, Exception):
                        raise end
                    drawn[end.key] = end.drawn
            return [drawn[key] for key in keys]
        except Exception:
            self._recover()
            raise

    def _submit(self, query: Query, draw: Mapping[str, Any] | None = None) -> str:
        self._asked += 1
        key = f"{self._asked:016x}"
        self._in_flight[key] = query
        # Nothing was ever cached in a cold query's own namespace.
        namespace = f"cold-{key}" if query.cold else None
        self.scheduler.submit(
            key, query.token_ids, adapter=adapter_id(query), namespace=namespace, draw=draw
        )
        return key

    def _advance(self) -> list[tuple[Query, Finished | EngineError]]:
        """One step: how what it ended has ended."""
        finished = self.scheduler.step()
        # Nothing runs and nothing can start, so the first in the queue never will.
        if finished is None:
            key, needed = self.scheduler.refuse_next()
            return [(self._in_flight.pop(key), self._does_not_fit(needed))]
        return [(self._in_flight.pop(each.key), _unless_aborted(each)) for each in finished]

    def _does_not_fit(self, needed: int) -> EngineError:
        return EngineError(
            f"a context and what is to be drawn after it, {needed} tokens, do not fit into "
            "SGLang's pool of "
            f"{self.scheduler.pool_tokens} tokens, of which pinned prefixes hold "
            f"{self.scheduler.locked_tokens}; "
            "call clear_kv_cache(), or load the model with a larger engine option max_total_tokens"
        )

    # --- key/value state --------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        if query not in self._pinned:
            self._evaluate_alone(query)
            self._pinned[query] = self.scheduler.lock(query.token_ids, adapter_id(query))
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._pinned.clear()
        self.scheduler.flush()

    def _evaluate_alone(self, query: Query) -> None:
        answers = self.genlm_step([query])
        while not answers:
            answers = self.genlm_step([])
        if isinstance(answers[0].row, Exception):
            raise answers[0].row

    # --- after a failure --------------------------------------------------------------------------

    def _recover(self) -> None:
        """Drop everything in flight, then prove that the scheduler still works by computing the
        pinned prefixes again."""
        pinned = list(self._pinned)
        self._pinned.clear()
        log.warning(
            "engine.recovering", backend="sgl", dropped=len(self._in_flight), pinned=len(pinned)
        )
        try:
            self._restart()
            self._probe(PROBE)
            for query in pinned:
                self._probe(query)
                self._pinned[query] = self.scheduler.lock(query.token_ids, adapter_id(query))
        except Exception as error:
            raise EngineDeadError(
                f"SGLang's scheduler does not work after a failed step ({type(error).__name__}: "
                f"{error}); reload the model"
            ) from error

    def _restart(self) -> None:
        self._in_flight.clear()
        self.scheduler.drop_everything()

    def _probe(self, query: Query) -> None:
        self._submit(query)
        ended: list[tuple[Query, Finished | EngineError]] = []
        while not ended:
            ended = self._advance()
        if isinstance(end := ended[0][1], Exception):
            raise end

    # --- the end ----------------------------------------------------------------------------------

    @hookimpl
    def genlm_close(self) -> None:
        self._in_flight.clear()
        self._pinned.clear()
        del self.model
        self.scheduler.close()


def _unless_aborted(finished: Finished) -> Finished | EngineError:
    return (
        finished
        if finished.failure is None
        else EngineError(f"SGLang aborted the request: {finished.failure}")
    )


def adapter_id(query: Query) -> str | None:
    """The adapter's id in SGLang. Versions are never reused, so neither are ids, and the radix
    cache is keyed by them."""
    return None if query.adapter is None else f"adapter-{query.adapter.version}"
