"""Sums and maxima over the nodes of a trie on CUDA, fused into one Triton kernel for each round.

Only a trie on a CUDA device imports this module.

A *value* is a weight if its index is below ``items``, otherwise what a kernel before made: rows
``[width - items]`` of ``made`` hold the rest of the work row. No kernel reads what it writes. So
the order of a stream is all the synchronisation there is, and none can race with itself.

A program computes a tile of rows and indices. Neighbouring threads take neighbouring indices, and
an index is read once for all rows of a tile. Programs are numbered along one axis, since only the
first axis of a grid takes any number of them.

Triton reads annotations, and knows no others than its own.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

from genlm.core.trie.plan import Plan, on_device
from genlm.core.trie.weights import SUM, Operation

#: How many indices and rows a program takes.
BLOCK, ROWS = 256, 4

#: What changes with each launch: a kernel compiled for one value serves all.
VARIES = ["rows", "items", "width", "count", "new_start", "results_start"]


@triton.jit
def _tile(rows, count, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """The positions ``[1, BLOCK]`` and the rows ``[ROWS, 1]`` of this program."""
    blocks = tl.cdiv(count, BLOCK)
    position = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    row = (tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS)
    # A batch may have more than 2**31 elements.
    return position[None, :], row[:, None].to(tl.int64)


@triton.jit
def _value(
    weights,
    row_stride,
    stride,
    made,
    items,
    width,
    row,
    index,
    mask,
    identity,
):
    """The values of ``index`` in ``row``; ``identity`` where the mask is off."""
    is_weight = index < items
    weight = tl.load(
        weights + row * row_stride + index.to(tl.int64) * stride, mask & is_weight, identity
    )
    is_made = index >= items
    result = tl.load(made + row * (width - items) + (index - items), mask & is_made, identity)
    return tl.where(is_weight, weight, result)


@triton.jit
def _combine(left, right, IS_SUM: tl.constexpr):
    """The sum, or the maximum as PyTorch has it: NaN if either is."""
    if IS_SUM:
        return left + right
    else:
        return tl.where((left > right) | (left != left), left, right)


@triton.jit(do_not_specialize=VARIES)
def combine_pairs(
    weights,
    row_stride,
    stride,
    made,
    rows,
    items,
    width,
    first,
    other,
    count,
    new_start,
    results_start,
    IS_FIRST: tl.constexpr,
    IS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One round: the new values are those of ``first`` in the first round, then neighbours."""
    position, row = _tile(rows, count, BLOCK, ROWS)
    is_pair = position < count
    mask = is_pair & (row < rows)
    new = tl.load(first + position, is_pair, 0) if IS_FIRST else new_start + position
    left = _value(weights, row_stride, stride, made, items, width, row, new, mask, 0.0)
    index = tl.load(other + position, is_pair, 0)
    right = _value(weights, row_stride, stride, made, items, width, row, index, mask, 0.0)
    target = made + row * (width - items) + (results_start - items) + position
    tl.store(target, _combine(left, right, IS_SUM), mask)


@triton.jit(do_not_specialize=VARIES)
def combine_rest(
    weights,
    row_stride,
    stride,
    made,
    rows,
    items,
    width,
    values,
    starts,
    count,
    results_start,
    IS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The results of more than two values, one a program: value ``starts[i]`` to ``starts[i +
    1]``."""
    result = tl.program_id(0) % count
    row = ((tl.program_id(0) // count) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    stop = tl.load(starts + result + 1)
    identity = 0.0 if IS_SUM else float("-inf")
    total = tl.full((ROWS, BLOCK), identity, made.dtype.element_ty)
    for start in range(tl.load(starts + result), stop, BLOCK):
        position = (start + tl.arange(0, BLOCK))[None, :]
        is_value = position < stop
        index = tl.load(values + position, is_value, 0)
        mask = is_value & (row < rows)
        more = _value(weights, row_stride, stride, made, items, width, row, index, mask, identity)
        total = _combine(total, more, IS_SUM)
    if IS_SUM:
        reduced = tl.sum(total, 1, keep_dims=True)
    else:  # tl.max passes over NaN, which this sum does not
        nan = tl.sum(tl.where(total != total, total, 0.0), 1, keep_dims=True)
        reduced = tl.max(total, 1, keep_dims=True) + nan
    target = made + row * (width - items) + (results_start - items) + result
    tl.store(target, reduced, row < rows)


@triton.jit(do_not_specialize=VARIES)
def gather(
    weights,
    row_stride,
    stride,
    made,
    rows,
    items,
    width,
    place,
    count,
    result,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The values of ``place``, ``[count]``, in every row of ``result``."""
    position, row = _tile(rows, count, BLOCK, ROWS)
    is_place = position < count
    mask = is_place & (row < rows)
    index = tl.load(place + position, is_place, 0)
    value = _value(weights, row_stride, stride, made, items, width, row, index, mask, 0.0)
    tl.store(result + row * count + position, value, mask)


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
        """See :meth:`~genlm.core.trie.device.TorchReducer.reduce`."""
        plan, rows = self._plan, len(weights)
        made = weights.new_empty((rows, plan.width - plan.items))
        result = weights.new_empty((rows, len(self._place)))
        if rows == 0:
            return result
        tiles = -(-rows // ROWS)
        source = (weights, *weights.stride(), made, rows, plan.items, plan.width)
        size = {"BLOCK": BLOCK, "ROWS": ROWS}
        of = {"IS_SUM": operation is SUM, **size}
        # Triton launches on the current device.
        with torch.cuda.device_of(weights):  # type: ignore[no-untyped-call]
            for step, other in zip(plan.rounds, self._others, strict=True):
                # The first round's new values are weights, and have no place of their own.
                is_first = step.new == step.results
                combine_pairs[_blocks(len(other)) * tiles,](
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
                combine_rest[count * tiles,](
                    *source, self._values, self._starts, count, plan.rest.results.start, **of
                )
            gather[_blocks(len(self._place)) * tiles,](
                *source, self._place, len(self._place), result, **size
            )
        return result


def _blocks(count: int) -> int:
    return -(-count // BLOCK)
