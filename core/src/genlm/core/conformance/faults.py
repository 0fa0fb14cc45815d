"""Errors in the middle of an engine's work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any


def failing_forward(model: Any) -> Callable[[int], AbstractContextManager[None]] | None:
    """A way to make a torch module raise in the middle of its forward; ``None`` for anything
    else."""
    from torch import nn

    if not isinstance(model, nn.Module):
        return None
    leaves = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not leaves:
        return None
    middle = leaves[len(leaves) // 2]

    @contextmanager
    def failing(times: int) -> Iterator[None]:
        left = threading.Semaphore(times)

        def fail(*_: object) -> None:
            if left.acquire(blocking=False):
                raise RuntimeError("planted by the conformance suite inside the model's forward")

        hook = middle.register_forward_hook(fail)
        try:
            yield
        finally:
            hook.remove()

    return failing
