"""Sums and maxima of rows of weights on a device, in PyTorch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from genlm.core.trie.plan import Indices, Plan, Rest, Round
from genlm.core.trie.weights import Operation

if TYPE_CHECKING:
    import torch


class TorchReducer:
    """Reduces rows of weights on any device, in PyTorch's own functions.

    Every gather makes a tensor of its own: into a part of another, PyTorch on a CPU takes four
    times as long.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device.

        Raises:
            RuntimeError, AssertionError: PyTorch cannot use the device; which one, depends on it.
        """
        self._plan = plan
        self._first = on_device(plan.first, device)
        self._others = [on_device(step.other, device) for step in plan.rounds]
        self._rest = on_device(_padded(plan.rest, plan.width), device)
        self._place = on_device(np.append(plan.place, np.arange(plan.items)), device)

    def reduce(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """Combine each row of weights for all nodes and leaves, in the work rows that
        :mod:`genlm.core.trie.plan` describes.

        Args:
            operation: How.
            weights: ``[rows, items]`` in float32 or float64, with any strides.

        Returns:
            ``[rows, nodes + items]``, contiguous, in the type of the weights.
        """
        import torch

        plan = self._plan
        work = weights.new_empty((len(weights), plan.width + 1))
        work[:, : plan.items] = weights
        work[:, plan.width].fill_(operation.identity)  # pads the rest
        first = slice(plan.items, plan.items + len(self._first))
        work[:, first] = weights.index_select(1, self._first)
        for step, other in zip(plan.rounds, self._others, strict=True):
            self._combine(operation, work, step, other)
        values = work.index_select(1, self._rest.flatten()).view(len(work), *self._rest.shape)
        reduce = getattr(torch, operation.reduction)
        reduce(values, dim=2, out=work[:, plan.rest.results])
        return work.index_select(1, self._place)

    def _combine(
        self, operation: Operation, work: torch.Tensor, step: Round, other: torch.Tensor
    ) -> None:
        """One round, in every work row."""
        import torch

        others = work.index_select(1, other)
        operation.of(torch)(work[:, step.new], others, out=work[:, step.results])


def on_device(indices: Indices, device: str) -> torch.Tensor:
    """Indices as int32 on a device: half as much to read as int64."""
    import torch

    return torch.from_numpy(indices.astype(np.int32)).to(device)


def _padded(rest: Rest, padding: int) -> Indices:
    """``[results, most values]`` The values of each result, followed by ``padding``."""
    counts = np.diff(rest.starts, append=len(rest.values))
    result = np.repeat(np.arange(len(counts)), counts)
    padded = np.full((len(counts), int(counts.max(initial=1))), padding, np.intp)
    padded[result, np.arange(len(rest.values)) - rest.starts[result]] = rest.values
    return padded
