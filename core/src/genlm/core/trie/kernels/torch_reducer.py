"""Sums and maxima over the nodes of a trie, in PyTorch's own functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from genlm.core.trie.plan import Indices, Plan, Rest
from genlm.core.trie.weights import Operation

if TYPE_CHECKING:
    import torch


class TorchReducer:
    """Reduces rows of weights on any device of PyTorch's.

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
        """See :class:`~genlm.core.trie.kernels.reducer.Reducer`. Fills the work rows that
        :mod:`genlm.core.trie.plan` describes."""
        import torch

        plan, combine = self._plan, operation.of(torch)
        work = weights.new_empty((len(weights), plan.width + 1))
        work[:, : plan.items] = weights
        work[:, plan.width].fill_(operation.identity)  # pads the rest
        new = weights.index_select(1, self._first)  # of the first round
        for step, other in zip(plan.rounds, self._others, strict=True):
            if step.new != step.results:
                new = work[:, step.new]
            combine(new, work.index_select(1, other), out=work[:, step.results])
        values = work.index_select(1, self._rest.flatten()).view(len(work), *self._rest.shape)
        reduce = getattr(torch, operation.reduction)
        reduce(values, dim=2, out=work[:, plan.rest.results])
        return work.index_select(1, self._place)


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
