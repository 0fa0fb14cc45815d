"""Calls of vLLM that compute: on its own CUDA stream, if it has one, and one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

# In vLLM, the current forward pass, the configuration of the model being loaded and, on a CPU,
# scratch memory are globals (``forward_context.py``, ``config/vllm.py``): if two models compute in
# two threads at once, one reads the other's, or the process dies.
_one_at_a_time = threading.RLock()


class EngineStream:
    """The stream that vLLM makes the current one in its thread.

    Graphs cannot be captured on the default stream, and communication between GPUs is slower there.
    So vLLM may replace the thread's stream in any call (``current_stream`` in its
    ``utils/torch_utils.py``). Such a stream and the default one, which the rest of the process
    uses, do not wait for each other.
    """

    def __init__(self) -> None:
        self._own: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """For a call of vLLM: on its stream, after all earlier work of the thread's own stream;
        later work of that stream waits for vLLM's. Other models' calls wait meanwhile."""
        with _one_at_a_time:
            outside = _current()
            if self._own is not None and outside is not None:
                self._own.wait_stream(outside)
                torch.cuda.set_stream(self._own)
            try:
                yield
            finally:
                inside = _current()
                if inside is not None:
                    outside = outside or torch.cuda.default_stream()
                    if inside != outside:
                        self._own = inside
                        outside.wait_stream(inside)
                        torch.cuda.set_stream(outside)


def used_here(rows: Iterable[torch.Tensor | None]) -> None:
    """Say that the thread's own stream reads some tensors of vLLM's stream: vLLM does not reuse
    their memory before that. The rows of a step share theirs, and it is named once."""
    there = [row for row in rows if row is not None and row.is_cuda]
    for row in {row.untyped_storage().data_ptr(): row for row in there}.values():
        row.record_stream(torch.cuda.current_stream(row.device))


def _current() -> torch.cuda.Stream | None:
    """``None`` if CUDA is not in use: asking PyTorch would start it, and then vLLM could not fork
    its workers from this process."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if in_use else None
