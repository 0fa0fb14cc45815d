"""The random generators of the whole process, which are the program's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Give the generators of Python, NumPy and PyTorch back the states that they had before: an
    engine may seed them as it loads, or draw first weights that nobody sees."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    # On a GPU that nothing has used yet, there is no state to keep, and to ask would use it.
    used = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(used):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
