"""Keeps mlx-lm from lowering the process's limit of open files."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_fewer() -> Iterator[None]:
    """Inside the block, limits can be raised but not lowered. When mlx-lm is imported, it sets the
    limit of open files to more than a Mac allows, and to less than many programs have. A lowered
    hard limit could not be raised again."""
    setrlimit = resource.setrlimit

    def raised(kind: int, wanted: tuple[int, int]) -> None:
        now, most = resource.getrlimit(kind)
        more = wanted[0] if most == resource.RLIM_INFINITY else min(wanted[0], most)
        if now != resource.RLIM_INFINITY and now < more:
            setrlimit(kind, (more, most))

    resource.setrlimit = raised
    try:
        yield
    finally:
        resource.setrlimit = setrlimit
