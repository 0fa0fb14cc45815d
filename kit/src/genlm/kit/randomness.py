"""The random generators of the whole process, which belong to the program."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """A context manager that restores the states of Python's and NumPy's global generators at its
    end, because an engine may seed them while it loads. PyTorch's generator is not restored,
    because the engine draws from it."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
