"""The runner: one forward of the model, logits for the wanted positions only."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from genlm.core.types import Adapter
from genlm.hf.adapters import AdapterSet
from genlm.hf.attention import LAYOUT_ARGUMENT
from genlm.hf.layout import Chunk, PackedLayout, UniformLayout
from genlm.hf.patterns import Pattern
from genlm.hf.pool import RowPool


class Runner:
    """Runs forwards.

    Only the wanted positions reach the output layer: a hook before it selects them. (The vocabulary
    is wide: rows for every position would cost more than the rest of a small model, in time and in
    memory.)

    Args:
        model: The causal language model.
        adapters: Its adapters.
        pool: Where key/value state goes.
        patterns: What each layer attends to; needed for packed forwards only.
    """

    def __init__(
        self, model: Any, adapters: AdapterSet, pool: RowPool, patterns: Sequence[Pattern] | None
    ) -> None:
        self._model = model
        self._adapters = adapters
        self.pool = pool
        self._patterns = patterns
        self._wanted: torch.Tensor | None = None
        takes = inspect.signature(model.forward).parameters
        self._cache_name = "cache_params" if "cache_params" in takes else "past_key_values"
        self._hook: Any = None
        self._hook_head()

    def close(self) -> None:
        """Take the hook off the model."""
        if self._hook is not None:
            self._hook.remove()

    @contextmanager
    def head_may_change(self) -> Iterator[None]:
        """While adapters are added or removed, which may wrap the output layer, or copy it with its
        hooks."""
        self.close()
        try:
            yield
        finally:
            self._hook_head()

    def _hook_head(self) -> None:
        head = self._model.get_output_embeddings()
        self._hook = head.register_forward_pre_hook(self._select) if head is not None else None

    def packed(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Run chunks of any start and size at once.

        Args:
            chunks: Those in rows first, by ascending slot, then those in trunks.
            tokens: All their tokens, in the same order.
            adapters: One per chunk.
            wanted: Indices into ``tokens``.

        Returns:
            ``[len(wanted), vocab_size]`` logits.
        """
        if self._patterns is None:
            raise ValueError("packed forwards need the layers' attention patterns")
        layout = PackedLayout(chunks, self._patterns)
        device = self._model.device
        self.pool.layout = layout
        ids = torch.tensor(tokens, device=device)[:, None]
        rows = [
            adapter
            for chunk, adapter in zip(chunks, adapters, strict=True)
            for _ in range(chunk.size)
        ]
        return self._forward(
            rows,
            wanted,
            input_ids=ids,
            position_ids=layout.positions.to(device)[:, None],
            # Of four dimensions, so that the model makes no mask of its own; the layout has them.
            attention_mask=ids.new_zeros((len(tokens), 1, 1, 1), dtype=torch.bool),
            past_key_values=self.pool,
            **{LAYOUT_ARGUMENT: layout},
        )

    def uniform(
        self,
        chunks: Sequence[Chunk],
        tokens: Sequence[int],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> torch.Tensor:
        """Run chunks of equal start and size, see :meth:`packed`; the model need only use the cache
        it is given."""
        self.pool.layout = UniformLayout(chunks)
        ids = torch.tensor(tokens, device=self._model.device).view(len(chunks), -1)
        positions = torch.arange(chunks[0].start, chunks[0].stop, device=ids.device).expand_as(ids)
        return self._forward(
            adapters, wanted, input_ids=ids, position_ids=positions, past_key_values=self.pool
        )

    def plain(
        self,
        contexts: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
        keep: Sequence[int],
    ) -> torch.Tensor:
        """Run whole contexts without any state, padded on the right, where a causal model does not
        look.

        Args:
            contexts: Token ids.
            adapters: One per context.
            keep: How many of each context's last positions are wanted.

        Returns:
            ``[sum(keep), vocab_size]`` logits.
        """
        width = max(len(context) for context in contexts)
        ids = torch.zeros(len(contexts), width, dtype=torch.long)
        wanted: list[int] = []
        for row, (context, count) in enumerate(zip(contexts, keep, strict=True)):
            ids[row, : len(context)] = torch.tensor(context)
            end = row * width + len(context)
            wanted.extend(range(end - count, end))
        return self._forward(
            adapters, wanted, input_ids=ids.to(self._model.device), use_cache=False
        )

    def stateful(
        self,
        cache: Any,
        tokens: Sequence[Sequence[int]],
        adapters: Sequence[Adapter | None],
        wanted: Sequence[int],
    ) -> tuple[torch.Tensor, Any]:
        """Run contexts of equal length, further by equal length, with transformers' own cache.

        Args:
            cache: What an earlier call returned, written to here; ``None`` begins the contexts.
            tokens: The next ones of each context.
            adapters: One per context.
            wanted: Indices into all tokens, context by context.

        Returns:
            ``[len(wanted), vocab_size]`` logits, and the cache.

        Raises:
            ValueError: the model returns no cache.
        """
        ids = torch.tensor(tokens, device=self._model.device)
        logits, outputs = self._outputs(
            adapters, wanted, input_ids=ids, **{self._cache_name: cache}
        )
        cache = getattr(outputs, self._cache_name, None)
        if cache is None:
            raise ValueError("it returns no cache")
        return logits, cache

    def _forward(
        self, rows: Sequence[Adapter | None], wanted: Sequence[int], **inputs: Any
    ) -> torch.Tensor:
        return self._outputs(rows, wanted, **inputs)[0]

    def _outputs(
        self, rows: Sequence[Adapter | None], wanted: Sequence[int], **inputs: Any
    ) -> tuple[torch.Tensor, Any]:
        inputs.setdefault("use_cache", True)
        self._wanted = torch.tensor(wanted, dtype=torch.long)
        width = inputs["input_ids"].shape[1]
        of_wanted = [at // width for at in wanted]
        try:
            with torch.inference_mode(), self._adapters.applied(rows, of_wanted):
                outputs = self._model(**inputs)
        finally:
            self._wanted = None
        flat: torch.Tensor = outputs.logits.flatten(0, -2)
        return flat if len(flat) == len(wanted) else flat[
            torch.tensor(wanted, device=flat.device)
        ], outputs

    def _select(self, head: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._wanted is None:
            return None
        hidden = args[0].flatten(0, -2)
        return (hidden.index_select(0, self._wanted.to(hidden.device)).unsqueeze(1), *args[1:])
