"""How many files the process may open, which is the program's own choice."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def never_fewer() -> Iterator[None]:
    """Inside the block, limits are raised and never lowered. mlx-lm sets that of open files as it
    is imported: to more than a Mac allows, and to less than many programs have. The greatest one
    that is allowed could not be raised again."""
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
