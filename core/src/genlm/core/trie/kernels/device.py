"""The trie's kernel for rows on a device: PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.plan import Indices, Plan, Rest
from genlm.core.trie.weights import Operation, ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float32, or in float64 if the result is to have that precision: on consumer GPUs
    float64 takes up to 64 times as long, and everywhere twice the memory traffic. Never waits for
    the device, unless the result is to be a NumPy array.
    """

    precision = "float32"

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device.

        Raises:
            InvalidOptionError: PyTorch does not know the device, or cannot use it here.
        """
        import torch

        try:
            kind = torch.device(device).type
        except RuntimeError as error:
            raise InvalidOptionError(
                f"device is {device!r}: it must be a PyTorch device, such as 'cuda:0' or 'cpu'"
            ) from error
        self.plan = plan
        self.device = device
        self._has_float64 = kind != "mps"
        try:
            self._first = torch.from_numpy(plan.first).to(device)
        except (AssertionError, RuntimeError) as error:  # PyTorch raises either, by device
            raise InvalidOptionError(
                f"device is {device!r}, which this PyTorch cannot use here: {error}"
            ) from error
        self._others = [torch.from_numpy(step.other).to(device) for step in plan.rounds]
        self._rest = torch.from_numpy(_padded(plan.rest, plan.width)).to(device)
        self._place = torch.from_numpy(plan.place).to(device)

    def _rows(self, ws: Any, batch: bool, dtype: torch.dtype) -> torch.Tensor:
        """Weights of any kind as ``[rows, items]`` on the device."""
        import torch

        if batch and isinstance(ws, list | tuple):
            none = torch.empty((0, self.plan.items), dtype=dtype, device=self.device)
            return torch.cat([none, *(self._rows(row, False, dtype) for row in ws)])
        tensor = (
            ws.detach()
            if isinstance(ws, torch.Tensor)
            else torch.from_numpy(np.ascontiguousarray(to_array(ws)))
        )
        rows: torch.Tensor = tensor if batch else tensor[None]
        check_shape(rows.shape[1:], self.plan.items)
        # The type first: MPS cannot even receive float64, and float32 is half as much to move.
        return rows.to(dtype).to(self.device)

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """See :class:`Kernel`."""
        import torch

        is_wide = wanted.name == "float64" and self._has_float64
        weights = self._rows(ws, batch, torch.float64 if is_wide else torch.float32)
        work = self._combine(operation, weights)
        return wanted.of_tensor(torch.cat([work.index_select(1, self._place), weights], dim=1))

    def _combine(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """The work rows that :mod:`genlm.core.trie.plan` describes, ``[rows, width + 1]``."""
        import torch

        plan, combine = self.plan, operation.of(torch)
        # The extra element is the identity; it pads the rest.
        work = weights.new_full((len(weights), plan.width + 1), operation.identity)
        work[:, : plan.items] = weights
        if plan.rounds:
            work[:, plan.rounds[0].new] = weights.index_select(1, self._first)
        for step, other in zip(plan.rounds, self._others, strict=True):
            combine(work[:, step.new], work.index_select(1, other), out=work[:, step.results])
        work[:, plan.rest.results] = getattr(work[:, self._rest], operation.reduction)(dim=2)
        return work


def _padded(rest: Rest, padding: int) -> Indices:
    """``[results, most values]`` The values of each result, followed by ``padding``."""
    counts = np.diff(rest.starts, append=len(rest.values))
    result = np.repeat(np.arange(len(counts)), counts)
    padded = np.full((len(counts), int(counts.max(initial=1))), padding, np.intp)
    padded[result, np.arange(len(rest.values)) - rest.starts[result]] = rest.values
    return padded
