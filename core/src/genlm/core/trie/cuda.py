"""The rounds of sums and maxima over a trie on CUDA, each fused into one launch of a Triton kernel.

Only a trie on a CUDA device imports this module. Triton reads annotations, and knows no others than
its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from genlm.core.trie.plan import Round
from genlm.core.trie.reducer import TorchReducer
from genlm.core.trie.weights import SUM, Operation

#: How many indices and rows a program takes. An index is read once for all of its rows.
BLOCK, ROWS = 256, 4

#: What changes with each launch: a kernel compiled for one value serves all.
VARIES = ["rows", "width", "count", "new_start", "results_start"]


@triton.jit(do_not_specialize=VARIES)
def combine_pairs(
    work,
    rows,
    width,
    other,
    count,
    new_start,
    results_start,
    IS_SUM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One round. What a program writes, it alone reads in the same launch."""
    blocks = tl.cdiv(count, BLOCK)  # along one axis: only the first takes any number of programs
    position = ((tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row = ((tl.program_id(0) // blocks) * ROWS + tl.arange(0, ROWS))[:, None]
    is_pair = position < count
    mask = is_pair & (row < rows)
    values = work + row.to(tl.int64) * width  # a batch may have more than 2**31 elements
    left = tl.load(values + new_start + position, mask, 0.0)
    right = tl.load(values + tl.load(other + position, is_pair, 0), mask, 0.0)
    if IS_SUM:  # noqa: SIM108 - the compiler takes one branch alone
        result = left + right
    else:  # as PyTorch has it: NaN if either is
        result = tl.where((left > right) | (left != left), left, right)
    tl.store(values + results_start + position, result, mask)


class TritonReducer(TorchReducer):
    """Reduces rows of weights on a GPU that Triton compiles for.

    A round is one launch, which reads both values of each pair and writes the result.
    """

    def _combine(
        self, operation: Operation, work: torch.Tensor, step: Round, other: torch.Tensor
    ) -> None:
        count, rows = len(other), len(work)
        if rows == 0:
            return
        # Triton launches on the current device.
        with torch.cuda.device_of(work):  # type: ignore[no-untyped-call]
            combine_pairs[triton.cdiv(count, BLOCK) * triton.cdiv(rows, ROWS),](
                work,
                rows,
                work.stride(0),
                other,
                count,
                step.new.start,
                step.results.start,
                IS_SUM=operation is SUM,
                BLOCK=BLOCK,
                ROWS=ROWS,
            )
