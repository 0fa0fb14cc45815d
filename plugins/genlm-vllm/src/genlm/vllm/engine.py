"""VllmEngine, the object that implements the hooks of the core on top of one vLLM engine core."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.checks import describe_error
from genlm.core.errors import EngineDeadError, EngineError, InvalidOptionError, UnsupportedError
from genlm.core.hookspecs import hookimpl
from genlm.core.logs import get_logger
from genlm.core.types import Answer, Query, Request, SampleRequest, ScoreRequest, query_of
from genlm.kit.memory import lower
from genlm.kit.nan_rows import REQUEST, Culprit, NanErrors, is_looked_for
from genlm.vllm.in_flight import RequestsInFlight
from genlm.vllm.internals import EngineCore
from genlm.vllm.request import VllmRequest
from genlm.vllm.rows import Rows
from genlm.vllm.sampling import draw_params, drawn_ids, row_params, score_params, vllm_draws
from genlm.vllm.scoring import cheaper_as_requests, scored, scores
from genlm.vllm.sessions import Sessions

log = get_logger()

#: The way to load a model in a type of a wider range than float16.
WIDER = "load it with engine_opts={'dtype': 'bfloat16'}"

#: The largest share of the mass that rounding may move between tokens, in any precision.
MAX_MOVED_MASS = 0.05


class VllmEngine:
    """One vLLM engine core, driven step by step.

    Args:
        llm: The ``vllm.LLM``.
        core: Its engine core.
        rows: The captured rows.
        sessions: Records of the contexts that stay in vLLM.
        live: Whether every answered context stays in vLLM, so that extending it costs only the new
            tokens.
    """

    def __init__(
        self, llm: Any, core: EngineCore, rows: Rows, sessions: Sessions, *, live: bool
    ) -> None:
        self.tokenizer = llm.get_tokenizer()
        self.vocab_size = core.vocab_size
        self.max_context: int | None = _max_context(core)
        self.device = rows.device
        self.dtype = core.dtype
        self.model = rows.model(llm)
        self.eos_token_ids: list[int] = []
        self.lacking = {"genlm_add_lora": "load it with engine_opts={'enable_lora': True}"}
        self.live = live
        self._core, self._rows, self._sessions = core, rows, sessions
        self._in_flight = RequestsInFlight(core, sessions.usage)
        self._numbers = itertools.count(1)
        self._width = self.vocab_size  # token ids from this one on are padding
        self._hides_padding = True
        looks = is_looked_for(self.device.partition(":")[0], core.dtype)
        nan_errors = NanErrors(core.dtype, WIDER, spreads=True)
        self._nan: NanErrors | None = nan_errors if looks else None
        self._culprit = Culprit()

    # --- rows, samples and scores -----------------------------------------------------------------

    @hookimpl
    def genlm_step(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
        dropped: Sequence[Request],
        width: int,
    ) -> list[Answer]:
        with lower("max_num_batched_tokens or max_num_seqs"), self._all_or_nothing():
            if width < self._width:  # in the first step
                self._hide_padding(width)
            self._drop(dropped)
            answers = self._receive(queries, samples, scores)
            self._make_room()
            if len(self._in_flight):
                finished = self._in_flight.advance()
                given = self._answers(finished)
                self._park(finished)
                if (error := self._nan_error(finished, given)) is None:
                    return answers + given
                alone = len(finished) + len(self._in_flight) == 1
                self._settle(error, finished[0].request, alone, self._launch)
            return answers

    def _receive(
        self,
        queries: Sequence[Query],
        samples: Sequence[SampleRequest],
        scores: Sequence[ScoreRequest],
    ) -> list[Answer]:
        """Hand new requests to vLLM; those that it cannot serve are answered with ``None``."""
        cheaper = set(self._cheaper_as_requests(scores)) if scores else ()
        declined = []
        for query in queries:
            self._launch(self._row_of(query))
        others: list[SampleRequest | ScoreRequest] = [*samples, *scores]
        for request in others:
            if self._is_native(request, cheaper):
                self._launch(self._prepared(request))
            else:
                declined.append(Answer(request, None))
        self._sessions.settle()
        return declined

    def _cheaper_as_requests(self, scores: Sequence[ScoreRequest]) -> list[ScoreRequest]:
        return cheaper_as_requests(scores, self._core) if self._hides_padding else []

    def _hide_padding(self, width: int) -> None:
        """Take all mass from padding tokens, and check that they have none."""
        self._width, self._hides_padding = width, False  # restored also if the evaluation fails
        self._rows.hide_padding(self.model, width)
        row = self.evaluate_alone(Query((0,), cold=True))
        self._hides_padding = bool((row[width:] == -torch.inf).all())
        if self._hides_padding:
            self._rows.narrow(width)

    def _is_native(
        self, request: SampleRequest | ScoreRequest, scores: Container[ScoreRequest]
    ) -> bool:
        """Whether vLLM serves this request itself, exactly and at less cost than rows. ``scores``
        are the scores of which this is true."""
        if isinstance(request, ScoreRequest):
            return request in scores
        return self._hides_padding and vllm_draws(request, self._core)

    def _row_of(self, query: Query) -> VllmRequest:
        """The request of a row. A cold request neither shares state nor leaves any behind."""
        is_warm, tokens = not query.cold, self._core.footprint(query.length)
        shareable = query.length - 1 if is_warm else 0
        return VllmRequest(query, query, tokens, shareable, self.live and is_warm)

    def _prepared(self, request: SampleRequest | ScoreRequest) -> VllmRequest:
        """The request of a draw or a score."""
        shareable = request.query.length - 1
        if isinstance(request, SampleRequest):
            tokens = self._core.footprint(shareable + request.params.max_tokens)
            return VllmRequest(request, request.query, tokens, shareable)
        prompt, shareable = scored(request), shareable if self._core.forks else 0
        return VllmRequest(
            request, prompt, self._core.footprint(prompt.length), shareable, self.live
        )

    def _as_asked(self, request: Request) -> VllmRequest:
        if isinstance(request, SampleRequest | ScoreRequest):
            return self._prepared(request)
        return self._row_of(query_of(request))

    def _launch(self, request: VllmRequest, *, pinned: bool = False) -> None:
        """Hand a request to vLLM: continue a live session, or start a new one."""
        prompt, extends = request.prompt, isinstance(request.request, Query) and not pinned
        session = self._sessions.take(prompt) if request.resumable and extends else None
        if session is not None and not self._core.can_extend(session):
            self._release([self._sessions.give_up_taken(session)])
            session = None
        self._culprit.launched += 1
        if session is None:
            request.request_id = f"genlm-{next(self._numbers)}"
            request.params = self._params(request)
            # A cold query has a cache salt of its own, so that vLLM finds no state for it.
            salt = f"cold-{request.request_id}" if prompt.cold else None
            self._in_flight.launch(request, salt, pinned=pinned)
            if isinstance(request.request, ScoreRequest):
                # Later extensions of this session ask for no scores.
                request.params = row_params(request.request_id)
        else:
            self._in_flight.extend(request, session)

    def _params(self, request: VllmRequest) -> Any:
        match request.request:
            case SampleRequest(_, params):
                key = None if self._nan is None else request.request_id
                return draw_params(key, params, self._core.seeds)
            case ScoreRequest() as score:
                key, by_id = request.request_id, self._core.scores_by_id
                return score_params(key, score, request.shareable, by_id=by_id)
        parent = self._sessions.taken_parent(request.prompt)
        source = None if parent is None else parent.request_id
        return row_params(request.request_id, source)

    def _answers(self, finished: Sequence[VllmRequest]) -> list[Answer]:
        ids = [each.request_id for each in finished if each.wants_row]
        taken = self._rows.take(ids)
        rows = dict(zip(ids, taken, strict=True))
        results = [_result(each, rows.get(each.request_id)) for each in finished]
        asked = [each.request for each in finished]
        if ScoreRequest in map(type, asked):
            _put_scores(results, finished)
        return [*map(Answer, asked, results)]

    def _nan_error(
        self, finished: Sequence[VllmRequest], answers: Sequence[Answer]
    ) -> EngineError | None:
        """The error for the first row, score or draw that is NaN, if the engine looks for NaN."""
        if self._nan is None:
            return None
        if SampleRequest in map(type, map(REQUEST, answers)):
            draws = [each for each in finished if not each.wants_row]
            broken = self._rows.were_broken([each.request_id for each in draws])
            for draw in itertools.compress(draws, broken):
                return self._nan.of_draw(draw.prompt)
        return next(iter(self._nan.in_answers(answers).values()), None)

    def _settle(
        self,
        error: EngineError,
        request: Request,
        alone: bool,
        launch: Callable[[VllmRequest], object],
    ) -> None:
        """See :meth:`genlm.kit.nan_rows.Culprit.settle`."""
        pinned = [one for one in self._sessions.pinned() if one != request]
        self._culprit.settle(
            error,
            alone=alone,
            forget=self._forget_nan,
            pin_again=lambda: [self.genlm_cache_prefix(one) for one in pinned],
            ask_again=lambda: launch(self._as_asked(request)),
        )

    def _forget_nan(self) -> None:
        """Drop all state, and overwrite it: on a CPU, NaN in a block of vLLM's cache also spoils
        contexts that get the block later."""
        self._forget()
        self._rows.clean_state(self._core)

    def _drop(self, requests: Sequence[Request]) -> None:
        """Release requests that no longer have callers."""
        if not requests:
            return
        dropped = self._in_flight.drop(set(requests))
        ids = [each.request_id for each in dropped]
        self._core.abort(ids)
        # A partly computed prompt may have captured a row, and logits of draws may be noted.
        self._rows.forget(ids)

    def _park(self, finished: Sequence[VllmRequest]) -> None:
        """Turn finished requests that vLLM keeps into live sessions."""
        replaced = map(self._sessions.park, [each for each in finished if each.is_kept])
        self._make_room([*filter(None, replaced)])

    def _make_room(self, replaced: Sequence[VllmRequest] = ()) -> None:
        """Release replaced sessions, and others until the rest fit in the KV cache together with
        everything in flight. If vLLM stands still, release all of them, because they then hold the
        blocks that it waits for, whatever was counted."""
        self._release([*replaced, *self._sessions.trim(len(self._in_flight))])
        if self._in_flight.has_stood_still() and (idle := self._sessions.drop_idle()):
            log.warning(
                "vllm.stood_still", sessions=len(idle), what="these idle sessions are released"
            )
            self._release(idle)

    def _release(self, sessions: Sequence[VllmRequest]) -> None:
        if not sessions:
            return
        ids = [session.request_id for session in sessions]
        self._core.abort(ids)
        if self._core.sessions_run:
            self._rows.forget(ids)  # a session that was preempted while idle may have a row

    # --- key/value state --------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        if not self._core.prefix_caching:
            raise UnsupportedError(
                "cache_kv needs vLLM's prefix caching, which is off for this model or by "
                "engine_opts"
            )
        if not self._sessions.is_pinned(query):
            request = self._row_of(query)
            self._sessions.check_room_for_pin(request)
            with self._all_or_nothing():
                self._pin(request)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._forget()

    def prove(self) -> None:
        """Compute a row, to show that the model works. Sessions stay running requests of vLLM if
        the row of an extended one agrees with the cold one."""
        if not self.max_context:
            raise InvalidOptionError(
                f"max_model_len={self._core.max_model_len} leaves no room for a context beside the "
                "token that vLLM draws; give at least 2"
            )
        ids = tuple(token_id % self.vocab_size for token_id in range(1, 7))[: self.max_context]
        cold = self.evaluate_alone(Query(ids, cold=True))
        if self.live:
            self._core.run_sessions()
        if not self._core.sessions_run:
            return
        try:
            for known in (ids[:3], ids[:4]):
                self.evaluate_alone(Query(known))
            off = distance(self.evaluate_alone(Query(ids)), cold)
            reason = f"rows are {off:.2g} apart" if off > MAX_MOVED_MASS else None
        except EngineDeadError:
            raise
        except Exception as error:
            reason = describe_error(error)
        self._forget()
        if reason is not None:
            log.warning("vllm.sessions_pause", reason=reason)
            self._core.pause_sessions()

    def evaluate_alone(self, query: Query) -> torch.Tensor:
        """The row of a query, computed while nothing else is in flight."""
        answers = self.genlm_step([query], [], [], [], self._width)
        while not answers:
            answers = self.genlm_step([], [], [], [], self._width)
        result: torch.Tensor | Exception = answers[0].result
        if isinstance(result, Exception):
            raise result
        return result

    def _pin(self, request: VllmRequest) -> None:
        """Keep a context as a session that is never extended, so that its blocks stay in vLLM's
        prefix cache."""
        request.resumable = True
        self._launch(request, pinned=True)
        self._make_room()
        (answer,) = self._answers(self._in_flight.finish())
        if isinstance(answer.result, Exception):
            raise answer.result
        self._sessions.pin(request)
        if (error := self._nan_error([request], [answer])) is not None:
            self._settle(error, request.request, True, self._pin)

    # --- failure and the end ----------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an exception inside the block, drop everything in flight, and all state that a
        failed step may have damaged.

        vLLM enters blocks in its prefix cache when it schedules them, before they are computed.
        """
        try:
            yield
        except Exception as error:
            said = describe_error(error)
            log.warning("vllm.failed", error=said, in_flight=len(self._in_flight))
            if self._core.is_dead(error):
                raise EngineDeadError(f"vLLM has died: {said}; load the model again") from error
            self._forget()
            raise

    def _forget(self) -> None:
        """Let vLLM drop all requests and its whole KV cache.

        Raises:
            EngineDeadError: vLLM cannot do this.
        """
        try:
            sessions = [session.request_id for session in self._sessions.clear()]
            self._core.abort([*self._in_flight.clear(), *sessions])
            self._rows.clear()
            forgotten = self._core.reset_prefix_cache()
        except Exception as error:
            raise EngineDeadError(
                f"vLLM cannot drop its requests: {error}; load the model again"
            ) from error
        if not forgotten:
            raise EngineDeadError("vLLM did not empty its KV cache; load the model again")

    @hookimpl
    def genlm_close(self) -> None:
        self._core.shutdown()
        self._rows.close()
        self.model = None


def _max_context(core: EngineCore) -> int:
    """The longest context, in tokens. vLLM's own limit includes the token that it draws."""
    longest = core.max_model_len - 1
    if core.max_positions is None or core.max_positions >= longest:
        return longest
    log.warning(
        "vllm.context_limited",
        tokens=core.max_positions,
        reason="vLLM has no dynamic rotary embeddings beyond max_position_embeddings",
    )
    return core.max_positions


def distance(row: torch.Tensor, other: torch.Tensor) -> float:
    """The total variation between two rows: how much mass is elsewhere."""
    return float((row.exp() - other.exp()).abs().sum() / 2)


def _put_scores(results: list[Any], finished: Sequence[VllmRequest]) -> None:
    """Put scores in the place of the rows for their last tokens."""
    scored = {
        at: (each.request.continuation, row, each.prompt_logprobs)
        for at, (each, row) in enumerate(zip(finished, results, strict=True))
        if isinstance(each.request, ScoreRequest)
        and isinstance(row, torch.Tensor)
        and each.prompt_logprobs is not None
    }
    for at, found in zip(scored, scores([*scored.values()]), strict=True):
        results[at] = found


def _result(finished: VllmRequest, row: torch.Tensor | None) -> Any:
    """The result of a finished request (for a score, the row of its last token), or an error if
    vLLM ended it without a result."""
    request, why = finished.request, finished.failure
    if isinstance(request, Query) and row is not None and why is None:  # by far the most
        return row
    if isinstance(request, SampleRequest):
        if why is not None:
            return EngineError(f"vLLM ended the request without drawing a token: {why}")
        return drawn_ids(finished.drawn, request.params)
    if why is not None or row is None:
        why = why or "no row was captured"
        return EngineError(f"vLLM ended the request without a row: {why}")
    if isinstance(request, ScoreRequest) and finished.prompt_logprobs is None:
        return EngineError("vLLM gave no log-probabilities of the prompt; ask again")
    return row
