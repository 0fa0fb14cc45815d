"""The parts of a client's time: what its own Python takes, and what the raw forward passes take."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

Ids = tuple[int, ...]

#: The methods by which a client requests rows.
ROWS = ("next_token_logprobs", "next_token_logprobs_sync", "batch_next_token_logprobs")
#: The other methods that a client calls.
CACHES = ("cache_kv", "clear_cache", "clear_kv_cache")


class Rows:
    """The rows that a program got. Played back, they cost nothing, so the program then takes only
    the time of its library and its own code."""

    def __init__(self, lm: Any) -> None:
        self._lm = lm
        self._rows: dict[Ids, Any] = {}
        self._turn: asyncio.Future[None] | None = None
        self._waiting = 0

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside the block, keep every row that a program gets."""
        row_of, row_now, rows_of = (getattr(self._lm, name) for name in ROWS)

        async def one(token_ids: Sequence[int], *given: Any, **options: Any) -> Any:
            row = self._rows[tuple(token_ids)] = await row_of(token_ids, *given, **options)
            return row

        def now(token_ids: Sequence[int], *given: Any, **options: Any) -> Any:
            row = self._rows[tuple(token_ids)] = row_now(token_ids, *given, **options)
            return row

        async def several(contexts: Sequence[Sequence[int]], *given: Any, **options: Any) -> Any:
            rows = await rows_of(contexts, *given, **options)
            self._rows.update(zip(map(tuple, contexts), rows, strict=True))
            return rows

        with self._instead(dict(zip(ROWS, (one, now, several), strict=True))):
            yield

    @contextlib.contextmanager
    def played_back(self) -> Iterator[None]:
        """Inside the block, give the same program the kept rows, in the same order.

        A row that was not kept raises a `KeyError`: the program has made other requests.
        """
        import torch

        def now(token_ids: Sequence[int], *given: Any, **options: Any) -> Any:
            return self._rows[tuple(token_ids)]

        async def one(token_ids: Sequence[int], *given: Any, **options: Any) -> Any:
            await self._batch()
            return now(token_ids)

        async def several(contexts: Sequence[Sequence[int]], *given: Any, **options: Any) -> Any:
            await self._batch()
            return torch.stack([now(token_ids) for token_ids in contexts])

        def nothing(*given: Any, **options: Any) -> None:
            pass

        with self._instead(
            dict(zip(ROWS, (one, now, several), strict=True)) | dict.fromkeys(CACHES, nothing)
        ):
            yield

    async def _batch(self) -> None:
        """Wait until a pass of the event loop brings no further waiting coroutine, as a batch
        does."""
        loop = asyncio.get_running_loop()
        if self._turn is None:
            self._turn = loop.create_future()
            loop.call_soon(self._release, loop, 0)
        self._waiting += 1
        await self._turn

    def _release(self, loop: asyncio.AbstractEventLoop, before: int) -> None:
        if self._waiting > before:
            loop.call_soon(self._release, loop, self._waiting)
            return
        assert self._turn is not None
        self._turn.set_result(None)
        self._turn, self._waiting = None, 0

    @contextlib.contextmanager
    def _instead(self, methods: dict[str, Any]) -> Iterator[None]:
        for name, method in methods.items():
            setattr(self._lm, name, method)
        try:
            yield
        finally:
            for name in methods:
                delattr(self._lm, name)


def batches_of() -> Any:
    """A wrapper that keeps the contexts of every batch that a model answers, in ``contexts``."""
    from genlm.core import hookimpl

    class Batches:
        def __init__(self) -> None:
            self.contexts: list[list[Ids]] = []

        @hookimpl
        def genlm_call_ended(self, hook: str, result: Any) -> None:
            if hook == "genlm_step" and result:
                self.contexts.append([answer.request.token_ids for answer in result])

    return Batches()


def forwards_of(batches: list[list[Ids]]) -> list[tuple[int, int, int]]:
    """The forward passes that these batches need: for each, the number of contexts, of known tokens
    and of new tokens. Tokens shared with an earlier context, or with another of the batch, are
    known."""
    known: set[Ids] = set()
    forwards = []
    for batch in batches:
        groups: dict[int, list[int]] = defaultdict(list)
        for ids in sorted(batch):
            past = next((n for n in range(len(ids) - 1, 0, -1) if ids[:n] in known), 0)
            groups[len(ids) - past].append(past)
            known.update(ids[:n] for n in range(past + 1, len(ids) + 1))
        forwards += [(len(pasts), max(pasts), new) for new, pasts in groups.items()]
    return forwards


def cpu_of_forwards(model: Any, forwards: list[tuple[int, int, int]]) -> float:
    """CPU seconds of these forward passes in raw transformers, each on an existing cache, with the
    logits of the last position, and log-softmax."""
    import torch
    from transformers import DynamicCache

    config = model.config
    heads, width = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    seconds = 0.0
    for contexts, past, new in forwards:
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            state = torch.randn(contexts, heads, past, width)
            cache.update(state, state.clone(), layer)
        ids = torch.zeros(contexts, new, dtype=torch.long)
        began = time.process_time()
        with torch.inference_mode():
            done = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            done.logits[:, -1].float().log_softmax(-1)
        seconds += time.process_time() - began
    return seconds
