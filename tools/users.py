"""The users of a model: each has a program of its own, which takes the model for an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from attrs import define, field

from genlm.conformance import Program, Violation
from genlm.conformance.compare import TOP_FACTOR, brief, check, deviation, difference, standing
from genlm.conformance.contexts import Contexts
from genlm.conformance.driver import LoopThread
from genlm.core import Adapter, AsyncLM, QueriesResetError, Query
from genlm.core.types import Answer, ReductionRequest, Request, ScoreRequest, TokenIds

#: Seconds that a user waits for the answers to new requests before it continues.
HURRY = 0.002


@define(eq=False)
class User:
    """A model in the hands of one of its users, with the hooks of an engine.

    Requests admitted by a step are made in an event loop, which several users share. Each user's
    adapters have names of their own. Everything else is a blocking call.

    Args:
        lm: The model.
        loop: The event loop in which requests are made.
        name: The name of the user.
        patience: The most seconds for which the model may do nothing while a request waits.
    """

    lm: AsyncLM
    loop: LoopThread
    name: str
    patience: float
    _tasks: dict[Request, asyncio.Future[Any]] = field(factory=dict, init=False)

    @property
    def tokenizer(self) -> Any:
        return self.lm.tokenizer

    def genlm_step(
        self, queries: Sequence[Query], samples: Any, scores: Any, dropped: Sequence[Request]
    ) -> list[Answer]:
        if queries and queries[0].cold:
            return [Answer(queries[0], self._cold(queries[0]))]
        return self.loop.run(self._step([*queries, *samples, *scores], dropped)).result()

    def genlm_cache_prefix(self, query: Query) -> None:
        self.lm.cache_kv(query.context, lora_name=self._lora(query.adapter))

    def genlm_clear_kv_cache(self) -> None:
        self.lm.clear_kv_cache()

    def genlm_add_lora(self, adapter: Adapter) -> None:
        self.lm.add_new_lora(adapter.path, self._name(adapter))

    def genlm_remove_lora(self, adapter: Adapter) -> None:
        self.lm.remove_lora(self._name(adapter))

    def leave(self) -> None:
        """Wait for no answer any more."""

        async def cancel() -> None:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

        self.loop.run(cancel()).result()

    def _cold(self, query: Query) -> torch.Tensor:
        lora = self._lora(query.adapter)
        while True:
            with suppress(QueriesResetError):
                return self.lm.next_token_logprobs_uncached(query.context, lora)

    def _name(self, adapter: Adapter) -> str:
        return f"{adapter.name} {adapter.version} of {self.name}"

    def _lora(self, adapter: Adapter | None) -> str | None:
        return None if adapter is None else self._name(adapter)

    async def _step(self, new: Sequence[Request], dropped: Sequence[Request]) -> list[Answer]:
        for request in dropped:
            self._tasks.pop(request).cancel()
        self._tasks.update({request: asyncio.ensure_future(self._ask(request)) for request in new})
        calls = -1
        while self._tasks:
            first = asyncio.FIRST_COMPLETED
            patience = HURRY if new else self.patience
            done, _ = await asyncio.wait(self._tasks.values(), timeout=patience, return_when=first)
            if done or new:
                break
            if self.lm.stats.batches == calls:
                raise Violation(f"nothing is answered within {patience:g} s{standing()}")
            calls = self.lm.stats.batches
        answered = [request for request, task in self._tasks.items() if task.done()]
        tasks = [(request, self._tasks.pop(request)) for request in answered]
        return [Answer(request, task.exception() or task.result()) for request, task in tasks]

    async def _ask(self, request: Request) -> Any:
        """Make a request, and repeat it if another user has reset waiting requests."""
        while True:
            with suppress(QueriesResetError):
                return await self._asked(request)

    def _asked(self, request: Request) -> Any:
        if isinstance(request, Query):
            return self.lm.next_token_logprobs(request.context, self._lora(request.adapter))
        context, lora = request.query.context, self._lora(request.query.adapter)
        if isinstance(request, ScoreRequest):
            return self.lm.sequence_logprobs(context, request.continuation, lora_name=lora)
        if isinstance(request, ReductionRequest):
            return self.lm.next_token_logprobs(context, lora, then=request.then)
        how: dict[str, Any] = {
            "temperature": request.params.temperature,
            "seed": request.params.seed,
        }
        return self.lm.sample(context, request.params.max_tokens, [], lora_name=lora, **how)


@define(eq=False, kw_only=True)
class Usual(Program):
    """The program of a user. Rows must agree with cold ones within the suite's tolerance, contexts
    are text if the tokenizer has words, and from time to time waiting requests and caches of all
    users are dropped.

    Args:
        contexts: The contexts to use.
    """

    engine: User
    contexts: Contexts
    #: The largest difference of a probability.
    deviation: float = field(default=0.0, init=False)

    def ways(self) -> dict[Callable[[], None], int]:
        return {**super().ways(), self.disturb: 3}

    def disturb(self) -> None:
        lm = self.engine.lm
        self.source.choice([lm.clear_cache, lm.reset_async_queries])()

    def width(self) -> int:
        return len(self.engine.lm.byte_vocab)

    def fresh(self, count: int) -> TokenIds:
        return self.contexts.long(count, self.source.randrange(1000))[:count]

    def compare_row(self, query: Query, row: torch.Tensor, of: slice = slice(None)) -> None:
        right = self.expected(query)
        if of == slice(None):
            self.deviation = max(self.deviation, deviation(row, right))
            found = difference(row, right, self.atol / TOP_FACTOR)
        else:
            near = row.allclose(right[of], rtol=self.atol, atol=self.atol)
            found = None if near else f"scores {row} instead of {right[of]}"
        check(found is None, f"{brief(query.token_ids)} with {query.adapter}: {found}")
