"""How much memory the KV cache may take."""

from __future__ import annotations

import torch

from genlm.kit.memory import available_memory

GIB = 1 << 30


def budget(given: int | None, device: torch.device) -> int:
    """The most bytes that the KV cache may take."""
    return _default_budget(device) if given is None else given


def _default_budget(device: torch.device) -> int:
    """On CUDA half of the free memory; else a quarter of the available memory, at most 4 GiB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    available = available_memory()
    return 2 * GIB if available is None else min(available // 4, 4 * GIB)
