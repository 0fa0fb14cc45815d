"""How much memory is free, whether it ran out, and which options to lower then."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from genlm.core.checks import describe_error
from genlm.core.errors import EngineError, GenlmError

#: The messages of PyTorch and MLX if they have no class of error for lack of memory: on a CPU (on
#: Windows in other words), in Metal, and if one of their libraries requested the memory.
_SAYS_SO = re.compile(
    r"can('t|not) allocate memory|not enough memory|unable to allocate|insufficient memory"
    r"|out of memory|bad_alloc|ALLOC_FAILED|maximum allowed buffer size",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _SAYS_SO.search(str(error)) is not None
    )


@contextmanager
def lower(what: str) -> Iterator[None]:
    """If memory runs out during the block, the error says which options to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, GenlmError) or not is_out_of_memory(error):
            raise
        raise EngineError(f"memory ran out ({describe_error(error)}); lower {what}") from error


def available_memory() -> int | None:
    """How many bytes this machine has available without swapping; ``None`` if it does not say."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():  # MemAvailable includes memory that only caches files
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None
