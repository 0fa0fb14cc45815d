"""The trie's kernel for rows on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.kernels.reducer import reducer_for
from genlm.core.trie.plan import Plan
from genlm.core.trie.weights import Operation, ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float32, or in float64 if the result is to have that precision: on consumer GPUs
    float64 takes up to 64 times as long, and everywhere twice the memory traffic. Never waits for
    the device, unless the result is to be a NumPy array.

    On CUDA, kernels written in Triton reduce the rows, if they have proved there that they compute
    what PyTorch's own functions do. Those reduce the rows elsewhere. They read and write about 1.5
    to 2 times as much: ``docs/gpu.md`` has the figures.
    """

    precision = "float32"

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device. On CUDA, a few rows are reduced both ways: where Triton has
        not compiled for this GPU before, that takes seconds.

        Raises:
            InvalidOptionError: PyTorch does not know the device, or cannot use it here.
        """
        import torch

        self.plan = plan
        self.device = device
        try:
            self._has_float64 = torch.device(device).type != "mps"
            self._reducer = reducer_for(plan, device)
        except (AssertionError, RuntimeError) as error:  # PyTorch raises either, by device
            raise InvalidOptionError(
                f"device is {device!r}, which this PyTorch cannot use here: {error}"
            ) from error

    def _rows(self, ws: Any, batch: bool, dtype: torch.dtype) -> torch.Tensor:
        """Weights of any kind as ``[rows, items]`` on the device."""
        import torch

        if batch and isinstance(ws, list | tuple):
            none = torch.empty((0, self.plan.items), dtype=dtype, device=self.device)
            return torch.cat([none, *(self._rows(row, False, dtype) for row in ws)])
        if not isinstance(ws, torch.Tensor):
            ws = torch.from_numpy(np.ascontiguousarray(to_array(ws)))
        rows: torch.Tensor = ws.detach() if batch else ws.detach()[None]
        check_shape(rows.shape[1:], self.plan.items)
        # The type first: MPS cannot even receive float64, and float32 is half as much to move.
        return rows.to(dtype).to(self.device)

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """See :class:`~genlm.core.trie.kernels.kernel.Kernel`."""
        import torch

        is_wide = wanted.name == "float64" and self._has_float64
        weights = self._rows(ws, batch, torch.float64 if is_wide else torch.float32)
        return wanted.of_tensor(self._reducer.reduce(operation, weights))
