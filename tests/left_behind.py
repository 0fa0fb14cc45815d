"""Finds what a model has left behind in its process."""

from __future__ import annotations

import contextlib
import gc
import random
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path

import numpy as np
import psutil
import torch


def left_behind(made: Collection[str] = ()) -> dict[str, object]:
    """Counts of everything that could outlive a model or its process.

    Args:
        made: The files in shared memory that this process has made, since other processes make some
            too.
    """
    gc.collect()
    process = psutil.Process()
    open_files = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the file descriptor of the listing itself
            open_files[file.name] = str(file.readlink())
    return {
        "files": sorted(Path(tempfile.gettempdir()).iterdir()),
        "shared memory": [name for name in sorted(made) if Path(name).exists()],
        "open files and sockets": open_files,
        "threads": sorted(str(thread) for thread in threading.enumerate()),
        "processes": process.children(recursive=True),
    }


def random_states() -> tuple[object, ...]:
    """The states of the random generators that a program shares with its models."""
    of_numpy = np.random.get_state()[1].tobytes()
    return random.getstate(), of_numpy, torch.get_rng_state().tolist()
