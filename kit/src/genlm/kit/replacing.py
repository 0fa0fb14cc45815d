"""Replaces a function of a library, for as long as a block runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(package: str, name: str, old: Any, new: Any) -> Iterator[None]:
    """Inside the block, a function is replaced in all modules of a package that have it under this
    name, also in modules that are imported inside the block."""
    _replace(package, name, old, new)
    try:
        yield
    finally:
        _replace(package, name, new, old)


def _replace(package: str, name: str, old: Any, new: Any) -> None:
    for path, module in list(sys.modules.items()):
        if path.startswith(package) and getattr(module, "__dict__", {}).get(name) is old:
            setattr(module, name, new)
