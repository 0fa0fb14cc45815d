"""Recorded steps: CUDA graphs, and the protocol that other recorders follow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """The operations of a step on the device, which can be repeated.

    Attributes:
        result: The result of the step, in memory of the recording. The next replay of any recording
            of the same recorder overwrites it.
    """

    result: torch.Tensor

    def replay(self) -> None:
        """Repeat the step on the same memory."""


class Recorder(Protocol):
    """Records steps.

    Attributes:
        nbytes: The memory that its recordings take.
    """

    nbytes: int

    def record(self, step: Callable[[], torch.Tensor]) -> Recording:
        """Record a step that has run before. The step may or may not be computed meanwhile.

        Raises:
            Exception: the step cannot be recorded.
        """

    def forget(self) -> None:
        """Free the memory of all recordings, none of which is used any more."""


class CudaGraph:
    """A step as a CUDA graph.

    Args:
        graph: The graph.
        result: The result of the step.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self._graph = graph
        self.result = result

    def replay(self) -> None:
        self._graph.replay()


class CudaGraphs:
    """Records CUDA graphs, which share one pool of memory.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # PyTorch's default stream for recording would be on the GPU that first asked for one.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forget()

    def record(self, step: Callable[[], torch.Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        # "thread_local", because other threads of the program may use the GPU meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            result = step()
        self.nbytes += max(torch.cuda.memory_reserved(self._device) - before, 0)
        return CudaGraph(graph, result)

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0


def recorder_for(device: torch.device) -> Recorder | None:
    """The recorder for a device; ``None`` if its steps cannot be recorded."""
    return CudaGraphs(device) if device.type == "cuda" else None
