"""Requests that vLLM is working on: launched, advanced step by step, and all dropped together when
a step fails."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import define, field

from genlm.core.errors import EngineError
from genlm.core.types import Query
from genlm.vllm.internals import EngineCore, Output, TokenIds

# Steps beyond those that the tokens in flight explain, before an engine that finishes nothing is
# given up.
PATIENCE = 1000


@define(eq=False)
class Flight:
    """One request.

    Attributes:
        key: Under which its row is captured.
        resumable: Whether vLLM keeps it when it is over, for more tokens to come.
        drawn: The tokens drawn so far.
        failure: Why vLLM ended it without drawing anything.
        prompt_logprobs: Those of its prompt's tokens from the second on, if it wants them and its
            prompt is computed.
    """

    request_id: str
    query: Query
    key: int
    resumable: bool = False
    drawn: list[int] = field(factory=list)
    failure: str | None = None
    prompt_logprobs: torch.Tensor | None = None

    def take(self, output: Output) -> bool:
        """Note what a step gave. ``True`` when the flight is over."""
        self.drawn += output.token_ids
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        if output.finished is not None and not self.drawn:
            self.failure = output.finished
        return output.finished is not None or (self.resumable and bool(self.drawn))


class Flights:
    """All requests in flight on one engine core."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._flights: dict[str, Flight] = {}
        self._empty_steps = 0
        self.tokens = 0  # what they take of the key/value cache when they are computed

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def uses_adapter(self) -> bool | None:
        """Whether a request in flight has an adapter; ``None`` with nothing in flight."""
        for flight in self._flights.values():
            return flight.query.adapter is not None
        return None

    def launch(
        self, flight: Flight, token_ids: TokenIds, params: Any, cache_salt: str | None = None
    ) -> None:
        """Hand a request to vLLM. ``token_ids`` is its prompt, or what to append to the session
        that it continues."""
        self._flights[flight.request_id] = flight
        self.tokens += self._core.footprint(len(flight.query.token_ids))
        self._core.add(
            flight.request_id,
            token_ids,
            params,
            flight.query.adapter,
            resumable=flight.resumable,
            cache_salt=cache_salt,
        )

    def advance(self) -> list[Flight]:
        """One step of vLLM. Returns the flights that it brought to their end."""
        over = []
        for output in self._core.step():
            flight = self._flights.get(output.request_id)
            if flight is not None and flight.take(output):
                over.append(flight)
                del self._flights[flight.request_id]
                self.tokens -= self._core.footprint(len(flight.query.token_ids))
        self._watch(over)
        return over

    def land(self) -> list[Flight]:
        """Step until nothing is in flight."""
        over = []
        while self._flights:
            over += self.advance()
        return over

    def drop(self) -> list[str]:
        """Forget all; the request ids that vLLM must let go."""
        dropped = list(self._flights)
        self._flights.clear()
        self.tokens = self._empty_steps = 0
        return dropped

    def _watch(self, over: Sequence[Flight]) -> None:
        """Nothing ever hangs: give up on an engine that goes on without finishing anything."""
        self._empty_steps = 0 if over else self._empty_steps + 1
        if self._empty_steps > PATIENCE + self.tokens // self._core.max_num_batched_tokens:
            raise EngineError(
                f"vLLM made {self._empty_steps} steps without finishing one of "
                f"{len(self._flights)} requests; load with "
                "a larger kv_cache_memory_bytes or gpu_memory_utilization, or with "
                "live_sessions=False"
            )
