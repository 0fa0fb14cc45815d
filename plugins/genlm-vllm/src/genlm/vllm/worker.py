"""Rows from workers in other processes (tensor parallelism, ray, a separate engine process), and
the known tokens of sessions for them.

vLLM imports this module by name in every worker process, and in the user's. A worker process serves
only one engine, so its row store may belong to the module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch

from genlm.vllm.capture import RowStore, capture_into, clean_state, hide_padding
from genlm.vllm.internals import groups_of_layers
from genlm.vllm.runner_tokens import Appended, Extended, RunnerTokens, runner_tokens
from genlm.vllm.shared_rows import MemoryOfReader, Place
from genlm.vllm.weights import load_of, watch

ROWS = RowStore()
READER = MemoryOfReader()

GenlmRowCapture = capture_into(ROWS)


class RowAccess:
    """The class for vLLM's option ``worker_extension_cls``: methods that ``collective_rpc`` can
    call."""

    rank: int  # vLLM's, of all workers
    parallel_config: Any
    vllm_config: Any
    model_runner: Any
    genlm_tokens: RunnerTokens
    genlm_end_watch: Callable[[], None]

    def __new__(cls, *args: Any, **named: Any) -> Self:
        """A worker, before it loads its model. Its process is watched until the model is loaded."""
        worker = super().__new__(cls)
        worker.genlm_end_watch = watch()
        return worker

    def genlm_take_rows(
        self, keys: Sequence[str], place: Sequence[Any] | None
    ) -> int | bytes | None:
        """The rows under ``keys``, ``[len(keys), vocab_size]`` float32; ``None`` if another rank
        has them.

        Args:
            keys: The keys.
            place: A :class:`~genlm.vllm.shared_rows.Place` in the reader's memory, if it has one.

        Returns:
            The width of rows that were put there; else the rows as bytes, because vLLM's channel to
            a separate engine process may change tensors.
        """
        rows = [row for row in ROWS.take(keys) if row is not None]
        # Of workers that share a layer, either all have the same rows, or only the first has rows.
        first = self.rank % self.parallel_config.tensor_parallel_size == 0
        if not first or len(rows) < len(keys):
            return None
        block = torch.stack(rows)
        if place is not None and READER.put(Place(*place), block):
            return block.shape[1]
        return block.cpu().numpy().tobytes()

    def genlm_were_broken(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`genlm.vllm.capture.RowStore.were_broken`."""
        return ROWS.were_broken(keys)

    def genlm_forget_rows(self, keys: Sequence[str]) -> None:
        """See :meth:`genlm.vllm.capture.RowStore.forget`."""
        ROWS.forget(keys)

    def genlm_clean_state(self) -> None:
        """See :func:`genlm.vllm.capture.clean_state`."""
        clean_state(self)

    def genlm_clear_rows(self) -> None:
        ROWS.clear()

    def genlm_hide_padding(self, width: int) -> None:
        """See :func:`genlm.vllm.capture.hide_padding`."""
        hide_padding(self.model_runner.model, width)

    def genlm_narrow_rows(self, width: int) -> None:
        """See :attr:`genlm.vllm.capture.RowStore.width`."""
        ROWS.width = width

    def genlm_keep_tokens(self) -> str | None:
        """Prepare for tokens of sessions that stay running requests.

        Returns:
            The reason why this worker's model runner cannot be given tokens, if there is one.
        """
        tokens = runner_tokens(self.model_runner)
        if isinstance(tokens, str):
            return tokens
        self.genlm_tokens = tokens
        return None

    def genlm_append_tokens(self, appended: Sequence[Appended]) -> None:
        """Give the model runner the tokens by which sessions are extended in the next step."""
        for request, start, token_ids in appended:
            self.genlm_tokens.append(Extended(*request), start, token_ids)
        self.genlm_tokens.write()

    def genlm_groups_of_layers(self) -> list[tuple[int, int, bool]]:
        """See :func:`genlm.vllm.internals.groups_of_layers`."""
        return groups_of_layers(self.model_runner.kv_cache_config, self.vllm_config)

    def genlm_load(self) -> tuple[dict[str, list[int]], list[str]] | None:
        """See :func:`genlm.vllm.weights.load_of`. Called once the model is loaded."""
        self.genlm_end_watch()
        load = load_of(self.model_runner.model)
        if load is None:
            return None
        return {name: list(shape) for name, shape in load.unread.items()}, list(load.unwritten)
