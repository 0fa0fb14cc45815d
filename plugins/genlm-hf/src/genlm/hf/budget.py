"""How much memory key/value state may take."""

from __future__ import annotations

import os
from pathlib import Path

import torch

GIB = 1 << 30


def budget(given: int | None, device: torch.device) -> int:
    """The most bytes of key/value state to keep."""
    return _default_budget(device) if given is None else given


def _default_budget(device: torch.device) -> int:
    """On CUDA half of the free memory; else a quarter of the available memory, at most 4 GiB."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 2
    available = _available_memory()
    return 2 * GIB if available is None else min(available // 4, 4 * GIB)


def _available_memory() -> int | None:
    """Bytes that this machine can give without swapping; ``None`` where it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # it counts what files are cached in; free pages are without that
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
