"""The random generators of the whole process, which are the program's own."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def left_alone(*gpus: int) -> Iterator[None]:
    """Give the generators of Python, NumPy and PyTorch back the states that they had before: an
    engine may seed them as it loads, or draw first weights that nobody sees.

    Args:
        gpus: Those of which a generator is used. If none is named, it is the current one, where
            the process has used it before: to ask another for its state would begin to use it.
    """
    of_python, of_numpy = random.getstate(), np.random.get_state()
    if not gpus and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        gpus = (torch.cuda.current_device(),)
    with torch.random.fork_rng(gpus):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
