"""What this processor is fast at, measured in a second by PyTorch's own products of matrices: one
thread or two, float32 or bfloat16."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: What takes this many times longer is worth a remark.
SLOWER = 1.2

#: How often the sides take turns, and how many products each time.
ROUNDS, PRODUCTS = 9, 8

#: A product of a small model: rows, columns before, columns after.
SHAPE = (32, 576, 1536)


def usable_processors() -> int:
    """How many processors this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def timings() -> str:
    """Whether two threads are faster than one, and bfloat16 than float32."""
    threads = f"threads: OMP_NUM_THREADS is {os.environ.get('OMP_NUM_THREADS') or 'not set'}"
    if usable_processors() < 2:
        compared = "there is one processor, so they were not timed"
    else:
        compared = threads_verdict(*_seconds_of_threads())
    return f"{threads}; {compared}\n{dtypes()}"


def dtypes() -> str:
    """Whether bfloat16 is faster than float32, with the option to choose it."""
    return f"dtype: {dtypes_verdict(*_seconds_of_dtypes())}"


def threads_verdict(one: float, two: float) -> str:
    """What the times of one and two threads, in seconds, mean."""
    compared = f"one takes {one * 1e3:.2f} ms where two take {two * 1e3:.2f} ms"
    if two < SLOWER * one:
        return compared
    return (
        f"{compared}\n"
        f"WARNING: two threads are {two / one:.1f} times slower than one: the processors are "
        "shared; run with OMP_NUM_THREADS=1"
    )


def dtypes_verdict(float32: float, bfloat16: float) -> str:
    """What the times of the two types, in seconds, mean."""
    compared = f"float32 takes {float32 * 1e3:.2f} ms where bfloat16 takes {bfloat16 * 1e3:.2f} ms"
    if float32 > SLOWER * bfloat16:
        return (
            f"{compared}: with many contexts hf may be faster on this processor with "
            "--option dtype=bfloat16, which rounds more"
        )
    return f"{compared}: float32, the default of hf, is right for this processor"


def _seconds_of_threads() -> tuple[float, float]:
    import torch

    before = torch.get_num_threads()
    product = _product(torch.float32)

    def on(count: int) -> Callable[[], object]:
        def run() -> object:
            torch.set_num_threads(count)
            return product()

        return run

    try:
        return _medians(on(1), on(2))
    finally:
        torch.set_num_threads(before)


def _seconds_of_dtypes() -> tuple[float, float]:
    import torch

    return _medians(_product(torch.float32), _product(torch.bfloat16))


def _product(dtype: torch.dtype) -> Callable[[], object]:
    import torch

    rows, before, after = SHAPE
    a, b = torch.ones(rows, before, dtype=dtype), torch.ones(before, after, dtype=dtype)
    return lambda: a @ b


def _medians(one: Callable[[], object], other: Callable[[], object]) -> tuple[float, float]:
    """The median seconds of both, which take turns."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(ROUNDS):
        for call, taken in zip((one, other), seconds, strict=True):
            call()  # starts threads, and compiles what is compiled
            began = time.perf_counter()
            for _ in range(PRODUCTS):
                call()
            taken.append((time.perf_counter() - began) / PRODUCTS)
    return statistics.median(seconds[0]), statistics.median(seconds[1])
