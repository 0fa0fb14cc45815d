"""Continuations of a prompt, drawn or scored: by the engine if it can, else from rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from genlm.core.runtime.batcher import Batcher
from genlm.core.runtime.executor import Result
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.sampling import Particle, TokenDrawer
from genlm.core.types import Query, Request, SampleRequest, SamplingParams, ScoreRequest, TokenIds

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: How many contexts of one continuation are asked at a time, if the engine does not score itself.
#: Each may take as much key/value state as the whole context.
PREFIXES = 32


class Continuations:
    """Draws and scores continuations of checked queries.

    Args:
        engine: Says what it draws and scores itself.
        batcher: Takes these requests.
        ask: Gives the row of a query.
    """

    def __init__(
        self,
        engine: LoadedEngine,
        batcher: Batcher[Request, Result],
        ask: Callable[[Query], Coroutine[Any, Any, torch.Tensor]],
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._ask = ask

    async def draw(self, query: Query, params: SamplingParams) -> list[int]:
        """The ids of one continuation, without the stop token."""
        if params.max_tokens and self._engine.draws and params.min_p is None:
            drawn: list[int] | None = await self._batcher.submit(SampleRequest(query, params))
            if drawn is not None:
                return drawn
        return [token_id async for token_id in self.stream(query, params)]

    async def stream(self, query: Query, params: SamplingParams) -> AsyncGenerator[int, None]:
        """The ids one by one, from rows, each as soon as it is drawn."""
        drawer = TokenDrawer(params)
        async for token_id in self._drawn(query, params, drawer):
            if token_id not in params.stop_token_ids:
                yield token_id

    async def particle(self, query: Query, params: SamplingParams) -> Particle:
        """One continuation from rows, with its log-probabilities."""
        drawer = TokenDrawer(params)
        ids = [token_id async for token_id in self._drawn(query, params, drawer)]
        stop = ids.pop() if ids and ids[-1] in params.stop_token_ids else None
        return Particle(tuple(ids), stop, drawer.logprob, drawer.proposal_logprob)

    async def _drawn(
        self, query: Query, params: SamplingParams, drawer: TokenDrawer
    ) -> AsyncGenerator[int, None]:
        """Every id that is drawn, with a stop token as the last: one row a token. When the loop
        over it is cancelled, so is its pending request."""
        for _ in range(params.max_tokens):
            token_id = drawer.draw(await self._ask(query))
            yield token_id
            if token_id in params.stop_token_ids:
                return
            query = query.extended((token_id,))

    async def score(self, query: Query, continuation: TokenIds) -> torch.Tensor:
        """The log-probability of each token of a continuation given all before it,
        ``[len(continuation)]`` float32."""
        import torch

        # A native score is normalised over the engine's rows. That is right unless they have
        # padding to drop.
        if self._engine.scores and self._engine.vocab_size <= self._engine.width:
            scores: torch.Tensor | None = await self._batcher.submit(
                ScoreRequest(query, continuation)
            )
            if scores is not None:
                return scores
        scored: list[torch.Tensor] = []
        for start in range(0, len(continuation), PREFIXES):
            ids = continuation[start : start + PREFIXES]
            prefixes = [query.extended(ids[:end]) for end in range(len(ids))]
            rows = await all_of(map(self._ask, prefixes))
            scored += [row[token_id] for row, token_id in zip(rows, ids, strict=True)]
            query = query.extended(ids)
        return torch.stack(scored)


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. When one fails, the others are cancelled: their results are useless."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
