"""Sums and maxima over the nodes of a trie, fused into one kernel for each round."""

from __future__ import annotations

import numpy as np
import torch

from genlm.core.trie.kernels import triton_kernels as kernels
from genlm.core.trie.kernels.torch_reducer import on_device
from genlm.core.trie.plan import Plan
from genlm.core.trie.weights import SUM, Operation


class TritonReducer:
    """Reduces rows of weights on a GPU that Triton compiles for.

    A round is one launch, which reads both values of each pair and writes the result. Weights are
    read where they are, with any strides, and are not copied.
    """

    def __init__(self, plan: Plan, device: str) -> None:
        """Move the plan to the device."""
        self._plan = plan
        self._first = on_device(plan.first, device)
        self._others = [on_device(step.other, device) for step in plan.rounds]
        self._values = on_device(plan.rest.values, device)
        self._starts = on_device(np.append(plan.rest.starts, len(plan.rest.values)), device)
        self._place = on_device(np.append(plan.place, np.arange(plan.items)), device)

    def reduce(self, operation: Operation, weights: torch.Tensor) -> torch.Tensor:
        """See :class:`~genlm.core.trie.kernels.reducer.Reducer`."""
        plan, rows = self._plan, len(weights)
        made = weights.new_empty((rows, plan.width - plan.items))
        result = weights.new_empty((rows, len(self._place)))
        if rows == 0:
            return result
        tiles = -(-rows // kernels.ROWS)
        source = (weights, *weights.stride(), made, rows, plan.items, plan.width)
        size = {"BLOCK": kernels.BLOCK, "ROWS": kernels.ROWS}
        of = {"IS_SUM": operation is SUM, **size}
        # Triton launches on the current device.
        with torch.cuda.device_of(weights):  # type: ignore[no-untyped-call]
            for step, other in zip(plan.rounds, self._others, strict=True):
                # The first round's new values are weights, and have no place of their own.
                is_first = step.new == step.results
                kernels.combine_pairs[_blocks(len(other)) * tiles,](
                    *source,
                    self._first,
                    other,
                    len(other),
                    step.new.start,
                    step.results.start,
                    IS_FIRST=is_first,
                    **of,
                )
            if count := len(plan.rest.starts):
                kernels.combine_rest[count * tiles,](
                    *source, self._values, self._starts, count, plan.rest.results.start, **of
                )
            kernels.gather[_blocks(len(self._place)) * tiles,](
                *source, self._place, len(self._place), result, **size
            )
        return result


def _blocks(count: int) -> int:
    return -(-count // kernels.BLOCK)
