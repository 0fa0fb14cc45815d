"""The captured rows: in this process, or in vLLM's workers in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from genlm.kit.loads import Load
from genlm.vllm.capture import RowStore, clean_state, hide_padding
from genlm.vllm.internals import EngineCore
from genlm.vllm.shared_rows import SharedRows
from genlm.vllm.streams import used_here
from genlm.vllm.weights import load_of


class LocalRows:
    """The rows of the requests in flight, by key, if the model runs in this process. They stay
    where they were computed.

    Attributes:
        device: The device of the rows, as PyTorch names it.
    """

    def __init__(self, store: RowStore, device_type: str) -> None:
        self._store = store
        self.device = (
            "cpu"
            if device_type == "cpu"
            else f"{device_type}:{torch.accelerator.current_device_index()}"
        )

    def take(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        """Remove and return one row for each key, ``[vocab_size]`` float32; ``None`` for a row that
        was never captured."""
        rows = self._store.take(keys)
        used_here(rows)
        return rows

    def were_broken(self, keys: Sequence[str]) -> list[bool]:
        """See :meth:`genlm.vllm.capture.RowStore.were_broken`."""
        return self._store.were_broken(keys)

    def forget(self, keys: Sequence[str]) -> None:
        """See :meth:`genlm.vllm.capture.RowStore.forget`."""
        self._store.forget(keys)

    def clean_state(self, core: EngineCore) -> None:
        """See :func:`genlm.vllm.capture.clean_state`."""
        core.call_workers(clean_state)

    def clear(self) -> None:
        self._store.clear()

    def close(self) -> None:
        """Nothing but rows is held here."""
        self._store.clear()

    def model(self, llm: Any) -> Any:
        """The underlying model for users: the ``torch.nn.Module`` itself."""
        return llm.collective_rpc("get_model")[0]

    def hide_padding(self, model: Any, width: int) -> None:
        """See :func:`genlm.vllm.capture.hide_padding`."""
        hide_padding(model, width)

    def narrow(self, width: int) -> None:
        """Keep no more than ``width`` entries of rows from now on."""
        self._store.width = width

    def load(self, model: Any) -> Load | None:
        """See :func:`genlm.vllm.weights.load_of`."""
        return load_of(model)


class WorkerRows:
    """The rows if the model runs in worker processes. One worker puts all rows of a step together
    into memory that it shares with this process, or sends them."""

    device = "cpu"

    def __init__(self, core: EngineCore) -> None:
        self._core, self._shared = core, SharedRows(core.vocab_size)

    def take(self, keys: Sequence[str]) -> list[torch.Tensor | None]:
        parts = range(0, len(keys), self._shared.most)
        return [row for at in parts for row in self._taken(keys[at : at + self._shared.most])]

    def _taken(self, keys: Sequence[str]) -> Sequence[torch.Tensor | None]:
        place = self._shared.place_for(len(keys))
        replies = self._core.call_workers("genlm_take_rows", list(keys), place)
        sent = next((reply for reply in replies if reply is not None), None)
        if sent is None:
            return [None] * len(keys)
        if isinstance(sent, int):
            return self._shared.read(len(keys), sent).unbind()
        # The bytes are read-only.
        block = np.frombuffer(sent, dtype=np.float32).reshape(len(keys), -1).copy()
        return torch.from_numpy(block).unbind()

    def were_broken(self, keys: Sequence[str]) -> list[bool]:
        replies = self._core.call_workers("genlm_were_broken", list(keys))
        return [any(each) for each in zip(*replies, strict=True)]

    def forget(self, keys: Sequence[str]) -> None:
        self._core.call_workers("genlm_forget_rows", list(keys))

    def clean_state(self, core: EngineCore) -> None:
        core.call_workers("genlm_clean_state")

    def clear(self) -> None:
        self._core.call_workers("genlm_clear_rows")

    def close(self) -> None:
        """Let go of the shared memory."""
        self._shared.close()

    def model(self, llm: Any) -> Any:
        """The underlying model for users: the ``vllm.LLM``, since the modules are in the
        workers."""
        return llm

    def hide_padding(self, model: Any, width: int) -> None:
        self._core.call_workers("genlm_hide_padding", width)

    def narrow(self, width: int) -> None:
        self._core.call_workers("genlm_narrow_rows", width)

    def load(self, model: Any) -> Load | None:
        """See :func:`genlm.vllm.weights.load_of`. Each worker reads a part of the checkpoint."""
        replies = self._core.call_workers("genlm_load")
        if None in replies:
            return None
        (first, _), *_ = replies
        unread = {name: first[name] for name in first if all(name in one for one, _ in replies)}
        return Load(unread, [*dict.fromkeys(name for _, some in replies for name in some)])


Rows = LocalRows | WorkerRows
