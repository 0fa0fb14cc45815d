"""Python's garbage collector, while very many objects are made that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Thresholds of the collector: garbage among the newest 100,000 objects is still freed, but older
#: objects are not searched again.
RARE = (100_000, 50, 1000)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run rarely: it would search what is made again and again.

    That is a seventh of the time until an hf model has loaded, since importing an engine makes a
    million objects, and three quarters of the time until a vocabulary has its tokens. The collector
    serves the whole process, so it is not switched off: other threads may work during the minutes
    that a large model takes.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < RARE[0]:  # off, already rare, or another model is loading
        yield
        return
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
