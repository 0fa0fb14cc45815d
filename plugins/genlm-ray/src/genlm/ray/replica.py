"""A replica: one model in an actor's process, asked by any number of programs.

An asyncio actor around an ordinary :class:`~genlm.core.AsyncLM`. So validation, batching across
calls, failure isolation and cancellation are the core's here too, and a row that is asked during a
long draw joins the engine's next step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch  # noqa: F401  # imported with the actor, so that the first row need not wait for it

from genlm.core import AsyncLM, SamplingParams, load_model_by_name
from genlm.core.errors import InvalidOptionError
from genlm.ray.wire import AdapterKey, Ask, Description, arguments_of, portable, unpacked

#: The hooks whose presence the program needs to know.
HOOKS = ("genlm_cache_prefix", "genlm_clear_kv_cache", "genlm_add_lora")

#: Rows by place, where they are; and the errors of those that are not.
Rows = tuple[np.ndarray[Any, Any] | None, dict[int, Exception]]


class Replica:
    """Loads in a method, not in the constructor, so that the inner backend's error reaches the
    user as it is."""

    def __init__(self) -> None:
        self._lm: AsyncLM | None = None
        self._loading = asyncio.Lock()
        self._asked: tuple[Any, ...] = ()
        self._adapters: dict[AdapterKey, str] = {}

    async def load(
        self,
        backend: str,
        model: str,
        options: Mapping[str, Any],
        adapters: Mapping[AdapterKey, str],
        pinned: Sequence[Ask],
    ) -> Description:
        """Load the model, unless it is there, and what the program has bound and pinned.

        Raises:
            InvalidOptionError: this replica serves another model (of a fleet of the same name).
            Exception: what the backend raises.
        """
        async with self._loading:  # several programs may come at once
            asked = (backend, model, dict(options))
            if self._lm is None:
                # Rows are cached where they are asked, once.
                ours = {"cache_size": 0, **options}
                self._lm = await asyncio.to_thread(load_model_by_name, model, backend, ours)
                self._asked = asked
            elif asked != self._asked:
                raise InvalidOptionError(
                    f"the fleet serves {self._asked[1]!r} on {self._asked[0]!r} with "
                    f"{self._asked[2]}, not {model!r} on {backend!r} with {dict(options)}; "
                    "give it another name, or the same model and options"
                )
            for key, path in adapters.items():
                if key not in self._adapters:
                    await self.add_adapter(key, path)
            for each in pinned:
                await self.pin(each)
            lm = self._lm
        # Rows have the tokenizer's width here; ids beyond it mean nothing to anybody.
        vocab_size = min(lm.context([0]).vocab_size, len(lm.byte_vocab))
        hooks = frozenset(hook for hook in HOOKS if lm.supports(hook))
        return Description(hooks, lm.tokenizer, vocab_size, lm.max_context)

    async def rows(self, asked: Sequence[Ask]) -> Rows:
        """The rows of several contexts as one array that owns its memory."""
        found = await asyncio.gather(*map(self._row, asked), return_exceptions=True)
        errors = {i: portable(row) for i, row in enumerate(found) if isinstance(row, BaseException)}
        rows = [row.cpu().numpy() for row in found if not isinstance(row, BaseException)]
        return (np.stack(rows) if rows else None), errors

    async def _row(self, asked: Ask) -> Any:
        ids = asked.token_ids()
        if asked.cold:
            ask = self.lm.next_token_logprobs_uncached
            return await asyncio.to_thread(ask, ids, lora_name=asked.adapter)
        return await self.lm.next_token_logprobs(ids, lora_name=asked.adapter)

    async def draw(self, asked: Ask, params: SamplingParams) -> list[int]:
        """A continuation, drawn here: a row for each of its tokens need not travel."""
        arguments = arguments_of(params)
        return await self.lm.sample(asked.token_ids(), lora_name=asked.adapter, **arguments)

    async def score(self, asked: Ask, continuation: bytes) -> np.ndarray[Any, Any]:
        """The log-probability of each token of a continuation."""
        ids = unpacked(continuation)
        scores = self.lm.sequence_logprobs(asked.token_ids(), ids, lora_name=asked.adapter)
        array: np.ndarray[Any, Any] = (await scores).cpu().numpy()
        return array

    # --- state: called while nothing of this program is in flight ---------------------------------

    async def pin(self, asked: Ask) -> None:
        await asyncio.to_thread(self.lm.cache_kv, asked.token_ids(), lora_name=asked.adapter)

    async def clear(self) -> None:
        await asyncio.to_thread(self.lm.clear_kv_cache)

    async def add_adapter(self, key: AdapterKey, path: str) -> None:
        await asyncio.to_thread(self.lm.add_new_lora, path, key)
        self._adapters[key] = path

    async def remove_adapter(self, key: AdapterKey) -> None:
        if self._adapters.pop(key, None) is not None:
            await asyncio.to_thread(self.lm.remove_lora, key)

    async def close(self) -> None:
        """Release the engine in order, before the process is ended."""
        if self._lm is not None:
            await asyncio.to_thread(self._lm.close)

    async def ping(self) -> None:
        """Answers at once, whatever the engine is at work on."""

    @property
    def lm(self) -> AsyncLM:
        if self._lm is None:
            raise RuntimeError("a replica was asked before it was loaded")
        return self._lm
