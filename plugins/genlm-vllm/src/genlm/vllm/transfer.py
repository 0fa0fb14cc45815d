"""Copies from the host to the model's device for which the host does not wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Values of the host on a device.

    An index that is a Python list, and any copy from memory that is not pinned, waits until the
    device has done all that it was given: in the middle of a step, the whole forward pass.

    Args:
        values: ``[n]``, of any type; integers become int64.
        device: Where they are wanted.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device, non_blocking=True)
    # PyTorch does not give pinned memory out again before the copy has ended.
    return host.pin_memory().to(device, non_blocking=True)
