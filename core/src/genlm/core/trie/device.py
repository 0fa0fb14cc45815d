"""The trie's kernel for rows on a device: PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.nodes import Ints, Nodes
from genlm.core.trie.plan import Indices, Plan
from genlm.core.trie.weights import Operation, ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float32, or in float64 if the result is to have that precision: on consumer GPUs
    float64 takes up to 64 times as long, and everywhere twice the memory traffic. Never waits for
    the device, unless the result is to be a NumPy array.

    Every gather makes a tensor of its own: into a part of another, PyTorch on a CPU takes four
    times as long.
    """

    precision = "float32"
    plan: Any

    def __init__(self, order: Ints, nodes: Nodes, device: str) -> None:
        """Make the plan, and move it to the device.

        Raises:
            InvalidOptionError: PyTorch does not know the device, or cannot use it here.
        """
        import torch

        self.device = device
        try:
            self._has_float64 = torch.device(device).type != "mps"
            self._prepare(order, nodes)
        # Which of the two PyTorch raises depends on the device.
        except (AssertionError, RuntimeError) as error:
            raise InvalidOptionError(
                f"device is {device!r}, which this PyTorch cannot use here: {error}"
            ) from error

    def _prepare(self, order: Ints, nodes: Nodes) -> None:
        # Few rounds, because on a GPU launching a round takes longer than the unnecessary combining
        # of the rest.
        self.plan = plan = Plan.of(order, nodes, fewest=2000)
        self._order = on_device(plan.order, self.device)
        self._rounds = [on_device(blocks, self.device) for blocks in plan.rounds]
        self._rest = on_device(plan.rest.ravel(), self.device)
        ranks = np.argsort(plan.order)  # the rank of each position
        self._place = on_device(np.append(plan.place, ranks), self.device)

    def reduce(self, operation: Operation, ws: Any, batch: bool, wanted: ResultType) -> Any:
        """See :meth:`~genlm.core.trie.cpu.CpuKernel.reduce`; in float32 unless ``wanted`` is
        wider."""
        import torch

        is_wide = wanted.name == "float64" and self._has_float64
        weights = self._rows(ws, batch, torch.float64 if is_wide else torch.float32)
        return wanted.of_tensor(self.combine(operation, weights))

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
        # Converted first, because MPS cannot receive float64, and float32 is half as much to move.
        return rows.to(dtype).to(self.device)

    def combine(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """Combine each row of weights for all nodes and leaves, in the work rows that
        :mod:`genlm.core.trie.plan` describes.

        Args:
            operation: How.
            weights: ``[rows, items]`` on the device, in float32 or float64, with any strides.

        Returns:
            ``[rows, nodes + items]``, contiguous, in the type of the weights.
        """
        import torch

        plan, combine = self.plan, operation.of(torch)
        work = weights.new_empty((len(weights), plan.width))
        work[:, -1].fill_(operation.identity)  # the last column is padding
        work[:, : plan.items] = weights.index_select(1, self._order)
        for left, right, results in plan.levels:
            combine(work[:, left], work[:, right], out=work[:, results])
        first, *rounds = self._rounds
        work[:, plan.results(first)] = work.index_select(1, first)
        for blocks in rounds:
            so_far = work[:, plan.results(blocks)]
            combine(so_far, work.index_select(1, blocks), out=so_far)
        rest = work.index_select(1, self._rest).view(len(work), *plan.rest.shape)
        so_far = work[:, plan.results(plan.rest)]
        combine(so_far, getattr(torch, operation.reduction)(rest, dim=2), out=so_far)
        return work.index_select(1, self._place)


def on_device(indices: Indices, device: str) -> torch.Tensor:
    """Indices as int32 on a device: half as much to read as int64."""
    import torch

    return torch.from_numpy(indices.astype(np.int32)).to(device)
