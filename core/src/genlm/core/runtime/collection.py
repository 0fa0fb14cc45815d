"""The garbage collector while an engine is loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

#: Thresholds of the collector: garbage among the newest 100,000 objects is freed still, but older
#: objects are not searched again.
RARE = (100_000, 50, 1000)


@contextmanager
def rare_collections() -> Iterator[None]:
    """Let the garbage collector run rarely.

    Imports of engines make a million objects that stay, which the collector would search again and
    again: that is a seventh of the time until an hf model has loaded. It belongs to the whole
    process, so it is not switched off: other threads may go on for the minutes that a large model
    takes.
    """
    before = gc.get_threshold()
    if not 0 < before[0] < RARE[0]:  # off, rare already, or another model is being loaded
        yield
        return
    gc.set_threshold(*RARE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
