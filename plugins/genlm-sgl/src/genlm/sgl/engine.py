"""SglEngine, the object that implements the hooks of the core on top of SGLang's scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from genlm.core import Adapter, Answer, EngineDeadError, EngineError, Query, hookimpl
from genlm.core.checks import describe_error
from genlm.core.errors import UnsupportedError
from genlm.core.logs import get_logger
from genlm.core.types import Request, SampleRequest, ScoreRequest, query_of
from genlm.kit.memory import lower
from genlm.kit.nan_rows import Culprit, NanErrors
from genlm.kit.new_requests import tokens_per_forward
from genlm.kit.scores import cheaper_as_requests
from genlm.sgl.internals import Scheduler
from genlm.sgl.new_requests import NewRequest, NewRequests
from genlm.sgl.sampling import native_draw

log = get_logger()

#: The way to load a model in a type of a wider range than float16.
WIDER = "load it with engine_opts={'dtype': 'bfloat16'}"

#: The key of a request that shows whether the scheduler works.
PROBE = Query(token_ids=(0,), cold=True)


class SglEngine:
    """One model in SGLang's scheduler, which admits new requests between its steps.

    Attributes:
        gives_scores: Whether SGLang is asked for scores. With LoRA, or if padding would have mass,
            they are made from rows instead.
    """

    gives_scores = True

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.tokenizer = scheduler.tokenizer
        self.model = scheduler.model
        self.eos_token_ids: list[int] = []
        self.lacking = {"genlm_add_lora": "load it with engine_opts={'enable_lora': True}"}
        self.vocab_size = scheduler.vocab_size
        self.max_context = scheduler.longest_prompt
        device = next(self.model.parameters()).device
        self.device = str(device)
        self.dtype = str(scheduler.dtype)
        # The width of rows, which is less if padding is known to have no mass.
        self._width = self.vocab_size
        nan_errors = NanErrors(self.dtype, WIDER, spreads=True)
        self._nan: NanErrors | None = nan_errors if scheduler.looks_for_nan else None
        self._culprit = Culprit()
        self._in_flight: dict[str, Request] = {}
        self._new_requests = NewRequests(scheduler, tokens_per_forward(device.type))
        self._pinned: dict[Query, Any] = {}
        self._asked = 0

    # --- evaluation -------------------------------------------------------------------------------

    @hookimpl
    @lower("the engine option chunked_prefill_size or max_running_requests")
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
        width: int,
    ) -> list[Answer]:
        try:
            if width < self.scheduler.width:  # true only in the first step
                self._hide_padding(width)
            self._drop(dropped)
            answers = self._receive(queries, samples, scores)
            self._new_requests.admit()
            if self._in_flight:
                answers += self._advance()
            return answers
        except Exception:
            self._recover()
            raise

    def _receive(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
    ) -> list[Answer]:
        """Take new requests. Those that SGLang cannot serve, or that rows serve as well, are
        answered with ``None``."""
        declined: list[Answer] = []
        for query in queries:
            self._take(query, query)
        native = set(cheaper_as_requests(scores) if self.gives_scores else ())
        for score in scores:
            if score in native:
                before = score.continuation[:-1]
                self._take(score, score.query.extended(before), scored=len(before))
            else:
                declined.append(Answer(score, None))
        for request in samples:
            draw = native_draw(request.params, self.scheduler.stop_token_ids)
            if draw is None:
                declined.append(Answer(request, None))
            else:
                self._take(request, request.query, draw=draw)
        return declined

    def _hide_padding(self, width: int) -> None:
        """Take all mass from padding tokens, and check that they have none."""
        # Restored also if the evaluation fails.
        gives_scores, self.gives_scores = self.gives_scores, False
        self.scheduler.hide_padding(width)
        row = self.evaluate_alone(PROBE)
        if bool((row[width:] == -torch.inf).all()):
            self.gives_scores, self._width = gives_scores, width

    def _drop(self, requests: Sequence[Request]) -> None:
        """Release requests that no longer have callers."""
        if not requests:
            return
        gone = set(requests)
        for key in [key for key, request in self._in_flight.items() if request in gone]:
            del self._in_flight[key]
            if not self._new_requests.drop(key):
                self.scheduler.abort(key)

    def _take(self, request: Request, prompt: Query, **how: Any) -> None:
        self._asked += 1
        self._culprit.launched += 1
        key = f"{self._asked:016x}"
        self._in_flight[key] = request
        adapter = adapter_id(prompt.adapter) if prompt.adapter else None
        self._new_requests.add(NewRequest(key, prompt, adapter, **how))

    def _advance(self) -> list[Answer]:
        """Make one step, and return the answers to the requests that it finished."""
        finished = self.scheduler.step()
        # If nothing runs and nothing can start, the first request in the queue will never start.
        if finished is None:
            key, needed = self.scheduler.refuse_next()
            return [Answer(self._in_flight.pop(key), self._does_not_fit(needed))]
        # Results of requests that have been dropped are left out.
        mine = {key: result for key, result in finished.items() if key in self._in_flight}
        asked = [self._in_flight.pop(key) for key in mine]
        answers = [_answer(*pair, self._width) for pair in zip(asked, mine.values(), strict=True)]
        if (error := self._nan_error([*mine], answers)) is None:
            return answers
        pinned, declined = [*self._pinned], list[Answer]()
        self._culprit.settle(
            error,
            alone=len(asked) + len(self._in_flight) == 1,
            forget=self._recover,
            pin_again=lambda: [self.genlm_cache_prefix(one) for one in pinned],
            ask_again=lambda: declined.extend(self._receive_one(asked[0])),
        )
        return declined

    def _receive_one(self, request: Request) -> list[Answer]:
        match request:
            case SampleRequest():
                return self._receive([], [request], [])
            case ScoreRequest():
                return self._receive([], [], [request])
            case Query():
                return self._receive([request], [], [])
        raise TypeError(type(request).__name__)

    def _nan_error(self, keys: Sequence[str], answers: Sequence[Answer]) -> EngineError | None:
        """The error for the first row, score or draw that is NaN, if the engine looks for NaN."""
        if self._nan is None:
            return None
        broken = self.scheduler.broken_draws.intersection(keys)
        self.scheduler.broken_draws -= broken
        for key, answer in zip(keys, answers, strict=True):
            if key in broken:
                return self._nan.of_draw(query_of(answer.request))
        return next(iter(self._nan.in_answers(answers).values()), None)

    def _does_not_fit(self, needed: int) -> EngineError:
        return EngineError(
            f"a context and the tokens to draw after it, {needed} in all, do not fit into "
            f"SGLang's pool of {self.scheduler.pool_tokens} tokens, of which pinned prefixes hold "
            f"{self.scheduler.locked_tokens}; "
            "call clear_kv_cache(), or load the model with a larger engine option max_total_tokens"
        )

    # --- key/value state --------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        if not self.scheduler.keeps_prompts:
            raise UnsupportedError(
                "cache_kv needs SGLang's radix cache, which is off for this model or by the engine "
                "option disable_radix_cache"
            )
        if query not in self._pinned:
            self.evaluate_alone(query)
            adapter = adapter_id(query.adapter) if query.adapter else None
            self._pinned[query] = self.scheduler.lock(query.token_ids, adapter)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._pinned.clear()
        self._settle()
        self.scheduler.flush()

    def _settle(self) -> None:
        """Step until SGLang is idle, because it releases dropped running requests only in its next
        step."""
        while self.scheduler.step() is not None:
            pass

    def evaluate_alone(self, query: Query) -> Any:
        """The row of a query while nothing else is in flight."""
        width = self.scheduler.width
        answers = self.genlm_step([query], [], [], [], width)
        while not answers:
            answers = self.genlm_step([], [], [], [], width)
        if isinstance(answers[0].result, Exception):
            raise answers[0].result
        return answers[0].result

    # --- after a failure --------------------------------------------------------------------------

    def _recover(self) -> None:
        """Drop everything in flight, and all state. The core then pins the pinned prompts again."""
        log.warning("engine.recovering", backend="sgl", dropped=len(self._in_flight))
        self._in_flight.clear()
        self._new_requests.clear()
        self._pinned.clear()
        try:
            self.scheduler.drop_everything()
        except Exception as error:
            raise EngineDeadError(
                f"SGLang's scheduler cannot drop its requests ({describe_error(error)}); "
                "reload the model"
            ) from error

    # --- the end ----------------------------------------------------------------------------------

    @hookimpl
    def genlm_close(self) -> None:
        self._in_flight.clear()
        self._new_requests.clear()
        self._pinned.clear()
        del self.model
        self.scheduler.close()


def _answer(request: Request, result: Any, width: int) -> Answer:
    """SGLang's result for a request. Rows lose the padding tokens from ``width`` on."""
    if isinstance(result, torch.Tensor):
        result = result[:width]
    elif isinstance(request, ScoreRequest) and not isinstance(result, Exception):
        row, scores = result
        result = torch.cat([scores, row[request.continuation[-1]].reshape(1)])
    return Answer(request, result)


def adapter_id(adapter: Adapter) -> str:
    """The adapter's id in SGLang. Ids are keys of the radix cache; like versions, they are never
    reused."""
    return f"adapter-{adapter.version}"
