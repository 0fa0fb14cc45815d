"""The engine object: the hooks of the contract, over one vLLM engine core."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.errors import EngineDeadError, EngineError, UnsupportedError
from genlm.core.hookspecs import hookimpl
from genlm.core.logs import get_logger
from genlm.core.types import Answer, Query, SamplingParams
from genlm.vllm.flights import Flight, Flights
from genlm.vllm.internals import EngineCore
from genlm.vllm.rows import Rows
from genlm.vllm.sampling import Draw, batches, draw_params, row_params, vllm_draws
from genlm.vllm.scoring import Score, scored, worth_scoring
from genlm.vllm.sessions import Session, Sessions

log = get_logger()


class VllmEngine:
    """One vLLM engine core, driven step by step.

    Args:
        llm: The ``vllm.LLM``.
        core: Its engine core.
        rows: Where captured rows come from.
        sessions: The books of the contexts that stay with vLLM.
        live: Whether every answered context stays, so that extending it costs only the new tokens.
    """

    def __init__(
        self, llm: Any, core: EngineCore, rows: Rows, sessions: Sessions, *, live: bool
    ) -> None:
        self.tokenizer = llm.get_tokenizer()
        self.vocab_size = core.vocab_size
        # vLLM counts the token that it draws besides.
        self.max_context: int | None = core.max_model_len - 1
        self.device = rows.device
        self.model = rows.model(llm)
        self.live = live
        self._core, self._rows, self._sessions = core, rows, sessions
        self._flights = Flights(core)
        self._waiting: list[Query] = []
        self._lost_pins: list[Query] = []
        self._numbers = itertools.count(1)

    # --- rows -------------------------------------------------------------------------------------

    @hookimpl
    def genlm_step(self, queries: Sequence[Query]) -> list[Answer]:
        with self._all_or_nothing():
            self._restore_pins()
            self._waiting += queries
            for query in self._next_turn():
                self._ask(query)
            self._make_room()
            over = self._flights.advance()
            answers = self._answers(over)
            self._park(over)
            return answers

    def _next_turn(self) -> list[Query]:
        """Those of the waiting queries that join the batch at this step: all."""
        turn, self._waiting = self._waiting, []
        return turn

    def _ask(self, query: Query) -> None:
        """Have vLLM compute one row: continue a live session, or begin anew."""
        session = None if query.cold else self._sessions.take(query)
        if session is None:
            # A cold query has a cache salt of its own, so that vLLM finds no key/value state for
            # it.
            salt = f"cold-{next(self._numbers)}" if query.cold else None
            flight = self._flight(query, self.live and not query.cold)
            self._flights.launch(flight, query.token_ids, row_params(flight.key), salt)
        else:
            appended = query.token_ids[len(session.token_ids) :]
            flight = Flight(session.request_id, query, next(self._numbers), resumable=True)
            self._flights.launch(flight, appended, row_params(flight.key))

    def _flight(self, query: Query, resumable: bool) -> Flight:
        number = next(self._numbers)
        return Flight(f"genlm-{number}", query, number, resumable)

    def _answers(self, flights: Sequence[Flight]) -> list[Answer]:
        rows = self._rows.take([flight.key for flight in flights])
        answers = []
        for flight, row in zip(flights, rows, strict=True):
            if row is None or flight.failure is not None:
                reason = flight.failure or "no row was captured"
                answers.append(
                    Answer(
                        flight.query, EngineError(f"vLLM ended the request without a row: {reason}")
                    )
                )
            else:
                answers.append(Answer(flight.query, row))
        return answers

    def _park(self, flights: Sequence[Flight]) -> None:
        """What vLLM holds on to becomes a live session."""
        for flight in flights:
            if flight.resumable and flight.failure is None:
                self._release(self._sessions.park(_session(flight)))
        self._make_room()

    def _make_room(self) -> None:
        """Let sessions go until the rest and all that is in flight fit the key/value cache
        together."""
        self._release(self._sessions.trim(self._flights.tokens))

    def _release(self, sessions: Sequence[Session]) -> None:
        self._core.abort([session.request_id for session in sessions])

    # --- sampling ---------------------------------------------------------------------------------

    @hookimpl
    def genlm_sample(
        self, queries: Sequence[Query], params: Sequence[SamplingParams]
    ) -> list[list[int]] | None:
        native = {
            vllm_draws(query, wish, self._core) for query, wish in zip(queries, params, strict=True)
        }
        if native == {False}:
            return None
        if len(native) > 1:
            # The core then asks in smaller batches, so that who draws, and with it what a seed
            # gives, is up to each alone.
            raise EngineError("vLLM draws some of these continuations and the core the others")
        draws = [
            Draw(self._flight(query, resumable=False), wish)
            for query, wish in zip(queries, params, strict=True)
        ]
        width = len(self.tokenizer)
        with self._all_or_nothing():
            for turn in self._turns(draws):
                for batch in batches(turn, self._core):
                    self._land([(draw.flight, draw_params(draw.params, width)) for draw in batch])
        return [draw.result() for draw in draws]

    def _turns(self, draws: Sequence[Draw]) -> list[Sequence[Draw]]:
        """Which draws may share a batch: all."""
        return [draws]

    def _land(self, requests: Sequence[tuple[Flight, Any]]) -> None:
        """Work on these requests, each with its parameters, to their end."""
        for flight, params in requests:
            self._flights.launch(flight, flight.query.token_ids, params)
        self._make_room()
        self._flights.land()

    # --- scoring ----------------------------------------------------------------------------------

    @hookimpl
    def genlm_sequence_logprobs(
        self, queries: Sequence[Query], continuations: Sequence[Sequence[int]]
    ) -> list[torch.Tensor] | None:
        if not worth_scoring([query.token_ids for query in queries], continuations, self._core):
            return None
        pairs = zip(queries, continuations, strict=True)
        scores = [
            Score(self._flight(scored(query, ids), resumable=False), ids) for query, ids in pairs
        ]
        with self._all_or_nothing():
            self._land([(score.flight, score.params) for score in scores])
            answers = self._answers([score.flight for score in scores])
        return [score.result(answer) for score, answer in zip(scores, answers, strict=True)]

    # --- key/value state --------------------------------------------------------------------------

    @hookimpl
    def genlm_cache_prefix(self, query: Query) -> bool:
        if not self._core.prefix_caching:
            raise UnsupportedError(
                "cache_kv needs vLLM's prefix caching, which is off for this model or by "
                "engine_opts"
            )
        if not self._sessions.is_pinned(query):
            self._sessions.check_room_for_pin(query)
            with self._all_or_nothing():
                self._pin(query)
        return True

    @hookimpl
    def genlm_clear_kv_cache(self) -> None:
        self._lost_pins = []
        self._forget()

    def _pin(self, query: Query) -> None:
        """Hold ``query`` as a session that is never extended: its blocks stay in vLLM's prefix
        cache."""
        flight = self._flight(query, resumable=True)
        self._land([(flight, row_params(flight.key))])
        (answer,) = self._answers([flight])
        if isinstance(answer.row, Exception):
            raise answer.row
        self._sessions.pin(_session(flight))

    def _restore_pins(self) -> None:
        """Compute again what was pinned when a failure made vLLM forget everything; what fails now
        is given up."""
        while self._lost_pins:
            query = self._lost_pins.pop(0)
            try:
                with self._all_or_nothing():
                    self._pin(query)
            except EngineDeadError:
                raise
            except Exception as error:
                log.warning(
                    "prefix.lost",
                    tokens=len(query.token_ids),
                    error=f"{type(error).__name__}: {error}",
                )

    # --- failure and the end ----------------------------------------------------------------------

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """After an exception nothing is in flight, and no key/value state is left that a failed
        step may have spoilt.

        vLLM enters blocks in its prefix cache when it schedules them, before they are computed.
        """
        try:
            yield
        except Exception as error:
            log.warning(
                "vllm.failed",
                error=f"{type(error).__name__}: {error}",
                in_flight=len(self._flights),
            )
            self._lost_pins += self._sessions.pinned
            if self._core.is_dead(error):
                raise EngineDeadError(
                    f"vLLM has died: {type(error).__name__}: {error}; load the model again"
                ) from error
            self._forget()
            raise

    def _forget(self) -> None:
        """Have vLLM drop all requests and all key/value state.

        Raises:
            EngineDeadError: it cannot.
        """
        self._waiting.clear()
        try:
            self._core.abort(
                [*self._flights.drop(), *(session.request_id for session in self._sessions.clear())]
            )
            self._rows.clear()
            forgotten = self._core.reset_prefix_cache()
        except Exception as error:
            raise EngineDeadError(
                f"vLLM cannot drop its requests: {error}; load the model again"
            ) from error
        if not forgotten:
            raise EngineDeadError(
                "vLLM does not let go of its key/value state; load the model again"
            )

    @hookimpl
    def genlm_close(self) -> None:
        self._core.shutdown()
        self.model = None


def _session(flight: Flight) -> Session:
    return Session(flight.request_id, flight.query.token_ids, flight.query.adapter)
