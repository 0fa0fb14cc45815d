"""Calls of vLLM that compute run on vLLM's own CUDA stream, if it has one, and one at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

# One call at a time: vLLM keeps the current forward pass, the configuration of the model being
# loaded and, on a CPU, scratch memory in globals (``forward_context.py``, ``config/vllm.py``). If
# two models computed in two threads at once, one would read the other's, or the process would die.
_one_at_a_time = threading.RLock()


class EngineStream:
    """The stream that vLLM makes the current one in its thread.

    Graphs cannot be captured on the default stream, and communication between GPUs is slower there.
    So any call of vLLM may replace the thread's current stream (``current_stream`` in its
    ``utils/torch_utils.py``). This stream and the default one, which the rest of the process uses,
    do not wait for each other.
    """

    def __init__(self) -> None:
        self._own: torch.cuda.Stream | None = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, work runs on vLLM's stream, after all earlier work of the thread's own
        stream. Later work of the own stream waits for it. Calls of other models wait until the
        block ends."""
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
    """Note that the thread's own stream reads some tensors of vLLM's stream, so that vLLM does not
    reuse their memory earlier. The rows of a step share memory, which is noted once."""
    there = [row for row in rows if row is not None and row.is_cuda]
    for row in {row.untyped_storage().data_ptr(): row for row in there}.values():
        row.record_stream(torch.cuda.current_stream(row.device))


def _current() -> torch.cuda.Stream | None:
    """The thread's current stream, or ``None`` if CUDA is not in use. Asking PyTorch would
    initialise CUDA, and then vLLM could not fork its workers from this process."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if in_use else None
