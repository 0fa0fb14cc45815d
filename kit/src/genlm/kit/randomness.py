"""The random generators of the whole process, which are the program's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Give the generators of Python and NumPy back the states that they had before: an engine may
    seed them as it loads. It seeds PyTorch's too, and that one it goes on to draw from."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
