"""Forwards on CUDA without cuDNN's attention."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType

import torch


class WithoutCudnn(AbstractContextManager[None]):
    """While any thread is inside the block, PyTorch's attention does not use cuDNN's kernels.

    On Hopper PyTorch prefers cuDNN, which compiles a plan for each new shape. This takes tens of
    milliseconds of the host's time. Growing contexts have a new shape in every step. The setting is
    global to the process, and is restored when the last forward has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: bool = True

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._before = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
                torch.backends.cuda.enable_cudnn_sdp(False)
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                torch.backends.cuda.enable_cudnn_sdp(self._before)


_without_cudnn = WithoutCudnn()


def attention_kernels(device: torch.device) -> AbstractContextManager[None]:
    """A context manager that limits the kernels of attention in a forward on a device."""
    return _without_cudnn if device.type == "cuda" else nullcontext()
