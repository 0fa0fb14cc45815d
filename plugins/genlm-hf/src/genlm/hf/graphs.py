"""Recorded steps: CUDA graphs, or what stands for them where there is no CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch


class Recording(Protocol):
    """What a step does on the device, to be done again.

    Attributes:
        result: What it gives, in memory of the recording: the next replay of this one or of another
            one of the same recorder writes over it.
    """

    result: torch.Tensor

    def replay(self) -> None:
        """Do it again, on the same memory."""


class Recorder(Protocol):
    """Records steps.

    Attributes:
        nbytes: The memory that its recordings take.
    """

    nbytes: int

    def record(self, step: Callable[[], torch.Tensor]) -> Recording:
        """Record a step that has run before. Whether it computes meanwhile is not said.

        Raises:
            Exception: the step cannot be recorded.
        """

    def forget(self) -> None:
        """All recordings have been dropped."""


class CudaGraph:
    """A step as a CUDA graph.

    Args:
        graph: The graph.
        result: What the step gives.
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
        # PyTorch's own stream for this would be on the GPU that is asked for one first.
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.forget()

    def record(self, step: Callable[[], torch.Tensor]) -> CudaGraph:
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self._device)
        # Of this thread only: the program's other threads may use the GPU meanwhile.
        mode = "thread_local"
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
            result = step()
        self.nbytes += max(torch.cuda.memory_reserved(self._device) - before, 0)
        return CudaGraph(graph, result)

    def forget(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self.nbytes = 0


def recorder_for(device: torch.device) -> Recorder | None:
    """What records the steps of a device; ``None`` where nothing does."""
    return CudaGraphs(device) if device.type == "cuda" else None
