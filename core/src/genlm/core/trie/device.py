"""The trie's kernel in PyTorch, for rows that live on an accelerator: the same plan, all rows at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from genlm.core.errors import InvalidOptionError
from genlm.core.trie.operation import Operation
from genlm.core.trie.plan import Plan
from genlm.core.trie.weights import ResultType, check_shape, to_array

if TYPE_CHECKING:
    import torch


class DeviceKernel:
    """Sums and maxima over the nodes of a trie, for rows on any PyTorch device.

    Computes in float64, or in float32 where the device has nothing wider (MPS).
    """

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device.

        :raises InvalidOptionError: PyTorch knows no device of that name.
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
        self._order = torch.from_numpy(plan.order).to(device)
        self._place = torch.from_numpy(plan.place).to(device)
        self._parts = [torch.from_numpy(part).to(device) for part in plan.parts]

    def rows(self, ws: Any, batch: bool) -> torch.Tensor:
        """Weights of any kind as ``[rows, words]`` on the device.

        :raises InvalidInputError: they have another shape.
        """
        import torch

        if batch and not isinstance(ws, torch.Tensor):
            return torch.cat([self.rows(row, batch=False) for row in ws])
        tensor = ws.detach() if isinstance(ws, torch.Tensor) else torch.from_numpy(to_array(ws))
        rows: torch.Tensor = tensor if batch else tensor[None]
        check_shape(rows.shape[1:], len(self.plan.order))
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
        work = weights.new_full((len(weights), plan.width), operation.identity)
        first, *larger = plan.levels
        work[:, : first.blocks] = weights.index_select(1, self._order)
        below = first
        for level in larger:
            pairs = work[:, below.start : below.stop]
            work[:, level.start : level.start + level.blocks] = combine(pairs[:, ::2], pairs[:, 1::2])
            below = level
        for ordinal, part in enumerate(self._parts):
            head = work[:, plan.ranges : plan.ranges + len(part)]
            picked = work.index_select(1, part)
            head.copy_(picked if ordinal == 0 else combine(head, picked))
        return work
