"""What a closed model has left behind."""

from __future__ import annotations

import contextlib
import gc
import tempfile
import threading
from collections.abc import Collection
from pathlib import Path

import psutil


def left_behind(made: Collection[str] = ()) -> dict[str, object]:
    """What a model could leave behind, that outlives it or its process.

    Args:
        made: The files in shared memory that this process has made: others make some as well.
    """
    gc.collect()
    process = psutil.Process()
    open_files = {}
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            open_files[file.name] = str(file.readlink())
    return {
        "files": sorted(Path(tempfile.gettempdir()).iterdir()),
        "shared memory": [name for name in sorted(made) if Path(name).exists()],
        "open files and sockets": open_files,
        "threads": sorted(str(thread) for thread in threading.enumerate()),
        "processes": process.children(recursive=True),
    }
