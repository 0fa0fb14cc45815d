"""Copies of many rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def copies_of(rows: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """A copy of each row, in memory of its own: whoever keeps one keeps no other alive. On a GPU a
    few kernels make all of them; one for each would take longer than a forward."""
    import torch

    # PyTorch has no copy of many. No number is below -inf, and nan stays nan.
    return torch._foreach_clamp_min([*rows], -math.inf) if rows else ()


def is_part(answer: Any) -> bool:
    """Whether an answer is a tensor that keeps more memory alive than its own."""
    return hasattr(answer, "untyped_storage") and answer.untyped_storage().nbytes() > answer.nbytes
