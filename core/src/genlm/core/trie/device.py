"""The trie's kernel in PyTorch, for rows that live on an accelerator: the same plan, all rows at
once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.operation import Operation
from genlm.core.trie.plan import Indices, Plan, Rest
from genlm.core.trie.weights import ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float64, or in float32 where the device has nothing wider (MPS).
    """

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device.

        :raises InvalidOptionError: PyTorch knows no device of that name, or cannot use it here.
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
        self.dtype = torch.float32 if kind == "mps" else torch.float64
        try:
            self._first = torch.from_numpy(plan.first).to(device)
        except (AssertionError, RuntimeError) as error:  # PyTorch raises either, by device
            raise InvalidOptionError(
                f"device is {device!r}, which this PyTorch cannot use here: {error}"
            ) from error
        self._others = [torch.from_numpy(step.other).to(device) for step in plan.rounds]
        self._rest = torch.from_numpy(_padded(plan.rest, plan.width)).to(device)
        self._place = torch.from_numpy(plan.place).to(device)

    def rows(self, ws: Any, batch: bool) -> torch.Tensor:
        """Weights of any kind as ``[rows, words]`` on the device.

        :raises InvalidInputError: they have another shape.
        """
        import torch

        if batch and isinstance(ws, list | tuple):
            none = torch.empty((0, self.plan.words), dtype=self.dtype, device=self.device)
            return torch.cat([none, *(self.rows(row, batch=False) for row in ws)])
        tensor = (
            ws.detach()
            if isinstance(ws, torch.Tensor)
            else torch.from_numpy(np.ascontiguousarray(to_array(ws)))
        )
        rows: torch.Tensor = tensor if batch else tensor[None]
        check_shape(rows.shape[1:], self.plan.words)
        # MPS cannot even receive float64.
        return rows.to(self.dtype).to(self.device)

    def reduce(self, operation: Operation, weights: torch.Tensor, wanted: ResultType) -> Any:
        """Combine ``weights``, ``[rows, words]``, to ``[rows, nodes + words]``."""
        import torch

        work = self._combine(operation, weights)
        return wanted.of_tensor(torch.cat([work.index_select(1, self._place), weights], dim=1))

    def _combine(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """The work rows; see :mod:`genlm.core.trie.plan`."""
        import torch

        plan, combine = self.plan, operation.of(torch)
        # One element more than the plan needs: with it the rest is padded.
        work = weights.new_full((len(weights), plan.width + 1), operation.identity)
        work[:, : plan.words] = weights
        if plan.rounds:
            work[:, plan.rounds[0].new] = weights.index_select(1, self._first)
        for step, other in zip(plan.rounds, self._others, strict=True):
            work[:, step.results] = combine(work[:, step.new], work.index_select(1, other))
        work[:, plan.rest.results] = getattr(work[:, self._rest], operation.reduction)(dim=2)
        return work


def _padded(rest: Rest, padding: int) -> Indices:
    """``[results, most values]`` The values of each result, followed by ``padding``."""
    counts = np.diff(rest.starts, append=len(rest.values))
    result = np.repeat(np.arange(len(counts)), counts)
    padded = np.full((len(counts), int(counts.max(initial=1))), padding, np.intp)
    padded[result, np.arange(len(rest.values)) - rest.starts[result]] = rest.values
    return padded
