"""Continuations of a prompt, drawn or scored: by the engine if it can, else from rows."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from genlm.core.runtime.batcher import Batcher
from genlm.core.runtime.lanes import the_copy
from genlm.core.runtime.loaded_engine import LoadedEngine
from genlm.core.sampling import Particle, TokenDrawer
from genlm.core.scoring import LIKELIEST, Score
from genlm.core.types import Query, SampleRequest, SamplingParams, ScoreRequest, TokenIds

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

#: How many contexts of one continuation are asked at a time, if the engine does not score itself.
#: Each may take as much key/value state as the whole context.
PREFIXES = 32

#: Queries, and how to draw after each.
Draws = Sequence[tuple[Query, SamplingParams]]


class Continuations:
    """Draws and scores continuations of checked queries.

    Args:
        engine: Says what it draws and scores itself.
        batcher: Takes these requests.
        rows: Gives the rows of queries, in one tensor.
    """

    def __init__(
        self,
        engine: LoadedEngine,
        batcher: Batcher,
        rows: Callable[[Sequence[Query]], Coroutine[Any, Any, torch.Tensor]],
    ) -> None:
        self._engine = engine
        self._batcher = batcher
        self._rows = rows

    async def draw(self, draws: Draws) -> list[list[int]]:
        """The ids of one continuation of each query, without the stop token."""
        drawn: list[list[int] | None] = [None] * len(draws)
        if (
            "samples" in self._engine.native
            and draws
            and draws[0][1].max_tokens
            and draws[0][1].min_p is None
        ):
            drawn = await self._batcher.submit([SampleRequest(*draw) for draw in draws], list)
        left = [draw for draw, ids in zip(draws, drawn, strict=True) if ids is None]
        particles = iter(await self.particles(left))
        return [list(next(particles).token_ids) if ids is None else ids for ids in drawn]

    async def particles(self, draws: Draws) -> list[Particle]:
        """One continuation of each query from rows, with its log-probabilities. They are drawn
        together: one call for the next rows of all that go on."""
        drawers = [TokenDrawer(params) for _, params in draws]
        queries = [query for query, _ in draws]
        drawn: list[list[int]] = [[] for _ in draws]
        stops: list[int | None] = [None for _ in draws]
        live = [i for i, (_, params) in enumerate(draws) if params.max_tokens]
        while live:
            rows = (await self._rows([queries[i] for i in live])).cpu()
            going_on = []
            for i, row in zip(live, rows.unbind(), strict=True):
                token_id, params = drawers[i].draw(row), draws[i][1]
                if token_id in params.stop_token_ids:
                    stops[i] = token_id
                    continue
                drawn[i].append(token_id)
                if len(drawn[i]) < params.max_tokens:
                    queries[i] = queries[i].extended((token_id,))
                    going_on.append(i)
            live = going_on
        return [
            Particle(tuple(ids), stop, drawer.logprob, drawer.proposal_logprob)
            for ids, stop, drawer in zip(drawn, stops, drawers, strict=True)
        ]

    async def stream(self, query: Query, params: SamplingParams) -> AsyncGenerator[int, None]:
        """The ids one by one, from rows, each as soon as it is drawn. When the loop over it is
        cancelled, so is its pending request."""
        drawer = TokenDrawer(params)
        for _ in range(params.max_tokens):
            token_id = drawer.draw((await self._rows([query]))[0])
            if token_id in params.stop_token_ids:
                return
            yield token_id
            query = query.extended((token_id,))

    async def score(self, query: Query, continuation: TokenIds) -> torch.Tensor:
        """The log-probability of each token of a continuation given all before it,
        ``[len(continuation)]`` float32."""
        scores = await self._native_scores(query, continuation)
        return (await self._scores(query, continuation))[0] if scores is None else scores

    async def judge(self, query: Query, continuation: TokenIds) -> Score:
        """A continuation's log-probability, and whether it is the greedy one."""
        scores = await self._native_scores(query, continuation)
        if scores is None:
            scores, likeliest = await self._scores(query, continuation)
            return Score(_total(scores), likeliest == list(continuation))
        is_greedy = True
        for end, logprob in enumerate(scores.tolist()):
            if logprob < LIKELIEST:
                row = (await self._rows([query.extended(continuation[:end])]))[0]
                if int(row.argmax()) != continuation[end]:
                    is_greedy = False
                    break
        return Score(_total(scores), is_greedy)

    async def _native_scores(self, query: Query, continuation: TokenIds) -> torch.Tensor | None:
        """What the engine scores itself; ``None`` if it does not."""
        # A native score is normalised over the engine's rows. That is right unless they have
        # padding to drop.
        if "scores" not in self._engine.native or self._engine.vocab_size > self._engine.width:
            return None
        scores: torch.Tensor | None = await self._batcher.submit(
            [ScoreRequest(query, continuation)], the_copy
        )
        return scores

    async def _scores(self, query: Query, continuation: TokenIds) -> tuple[torch.Tensor, list[int]]:
        """The scores from rows, and the most likely token in each token's place."""
        import torch

        scored: list[torch.Tensor] = []
        likeliest: list[int] = []
        for start in range(0, len(continuation), PREFIXES):
            ids = continuation[start : start + PREFIXES]
            rows = await self._rows([query.extended(ids[:end]) for end in range(len(ids))])
            scored.append(rows[range(len(ids)), ids])
            likeliest += rows.argmax(-1).tolist()
            query = query.extended(ids)
        return torch.cat(scored), likeliest


async def all_of(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all. When one fails, the others are cancelled: their results are useless."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        raise


def _total(scores: torch.Tensor) -> float:
    return float(scores.double().sum())
