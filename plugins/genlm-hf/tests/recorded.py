"""Recorded steps on a CPU: their operators run again on the same memory, as a CUDA graph does."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from genlm.hf import strategies
from genlm.hf.operators import Operators


@contextmanager
def recorded_steps(recorder: Any = None) -> Iterator[Any]:
    """Engines that are made meanwhile record their steps by this, or by their operators."""
    recorder = recorder or Operators()
    with patch.object(strategies, "recorder_for", lambda device: recorder):
        yield recorder


@contextmanager
def forwards_of(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shapes of the tokens of every forward that Python runs meanwhile. A hook would show them
    too, but where there is one, no step is of constant shape."""
    kind, shapes = type(model), list[tuple[int, ...]]()
    forward = kind.forward

    @functools.wraps(forward)
    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self is model:
            shapes.append(tuple(kwargs["input_ids"].shape))
        return forward(self, *args, **kwargs)

    with patch.object(kind, "forward", seen):
        yield shapes
