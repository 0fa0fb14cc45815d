"""Copies from the host to the model's device, without making the host wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def to_device(values: torch.Tensor | Sequence[int], device: torch.device) -> torch.Tensor:
    """Copy values of the host to a device.

    Indexing with a Python list, and any copy from memory that is not pinned, would wait until the
    device has finished all its work: in the middle of a step, the whole forward pass.

    Args:
        values: ``[n]``, of any type; integers become int64.
        device: The device to copy them to.
    """
    host = values if isinstance(values, torch.Tensor) else torch.tensor(values, dtype=torch.int64)
    if device.type != "cuda":
        return host.to(device, non_blocking=True)
    # PyTorch does not reuse pinned memory before the copy has ended.
    return host.pin_memory().to(device, non_blocking=True)
