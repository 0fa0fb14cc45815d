"""Numbers that programs give in a tensor, an array or a list, as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def as_tensor(given: Any, dtype: torch.dtype | None = None) -> torch.Tensor | None:
    """A tensor of the given numbers; ``None`` if they are not numbers.

    A tensor stays on its device, and is copied only if its type changes.
    """
    import numpy as np
    import torch

    try:
        if not isinstance(given, torch.Tensor) and hasattr(given, "__array__"):
            array = np.asarray(given)
            # A copy, because PyTorch takes no negative strides and no foreign byte order, and warns
            # of memory that is read-only.
            given = array.astype(array.dtype.newbyteorder("="), order="C")
        return torch.as_tensor(given, dtype=dtype)
    except (TypeError, ValueError, RuntimeError):
        return None


def is_integral(vector: torch.Tensor) -> bool:
    """Whether a tensor is of integers, which booleans are not."""
    import torch

    return not (vector.is_floating_point() or vector.is_complex() or vector.dtype == torch.bool)
