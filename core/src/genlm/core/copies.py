"""Copies of many rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from genlm.core.runtime.combiners import JointCombiner

if TYPE_CHECKING:
    import torch


def copies_of(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A copy of each row, in memory of its own, so that keeping one row keeps no other alive. On a
    GPU a few kernels make all copies; one kernel for each would take longer than a forward."""
    import torch

    # PyTorch has no function that copies many tensors at once. Clamping from below at -inf changes
    # no number, and keeps nan.
    return torch._foreach_clamp_min([*rows], -math.inf) if rows else ()


class Copy(JointCombiner["torch.Tensor"]):
    """Makes the caller's own copy of the only requested row."""

    @staticmethod
    def together(calls: Sequence[tuple[Copy, Sequence[Any]]]) -> Sequence[Any]:
        return copies_of([row for _, (row,) in calls])


the_copy = Copy()


def is_row(result: Any) -> bool:
    """Whether a result is a tensor of floats, as rows and scores are."""
    return hasattr(result, "untyped_storage") and result.is_floating_point()


def is_part(result: Any) -> bool:
    """Whether a result is a tensor that keeps more memory alive than its own."""
    return hasattr(result, "untyped_storage") and result.untyped_storage().nbytes() > result.nbytes
