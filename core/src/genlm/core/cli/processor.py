"""Timings of this processor with PyTorch, within a second: one thread or two, float32 or
bfloat16."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence

#: From this ratio of two times on, `genlm doctor` recommends the faster way.
SLOWER_RATIO = 1.2

#: How many times the two sides take turns, and the seconds of each turn.
TURNS, TURN_SECONDS = 5, 0.03

#: The size of a product in a small model: rows, input columns, output columns.
PRODUCT_SHAPE = (32, 576, 1536)


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
        compared = threads_verdict(*_medians(("float32", 1), ("float32", 2)))
    return f"{threads}; {compared}\n{dtypes()}"


def dtypes() -> str:
    """Whether bfloat16 is faster than float32, with the option to choose it."""
    import torch

    count = torch.get_num_threads()
    return f"dtype: {dtypes_verdict(*_medians(('float32', count), ('bfloat16', count)))}"


def threads_verdict(one: float, two: float) -> str:
    """A verdict on the times of one and two threads, in seconds."""
    compared = f"one takes {one * 1e3:.2f} ms where two take {two * 1e3:.2f} ms"
    if two < SLOWER_RATIO * one:
        return compared
    return (
        f"{compared}\n"
        f"WARNING: two threads are {two / one:.1f} times slower than one: the processors are "
        "shared; run with OMP_NUM_THREADS=1"
    )


def dtypes_verdict(float32: float, bfloat16: float) -> str:
    """A verdict on the times of the two types, in seconds."""
    compared = f"float32 takes {float32 * 1e3:.2f} ms where bfloat16 takes {bfloat16 * 1e3:.2f} ms"
    if float32 > SLOWER_RATIO * bfloat16:
        return (
            f"{compared}: with many contexts hf may be faster on this processor with "
            "--option dtype=bfloat16, which rounds more"
        )
    return f"{compared}: float32, the default of hf, is right for this processor"


def _medians(*sides: tuple[str, int]) -> Sequence[float]:
    """The median seconds of a product of matrices, in a type and with a number of threads. The
    sides take turns, since other work may come and go."""
    import torch
    from torch.utils.benchmark import Timer

    rows, before, after = PRODUCT_SHAPE
    timers = []
    for name, threads in sides:
        of_type = {"dtype": getattr(torch, name)}
        both = {"a": torch.ones(rows, before, **of_type), "b": torch.ones(before, after, **of_type)}
        timers.append(Timer("a @ b", globals=both, num_threads=threads))
    taken = [
        [timer.blocked_autorange(min_run_time=TURN_SECONDS).median for timer in timers]
        for _ in range(TURNS)
    ]
    return [statistics.median(side) for side in zip(*taken, strict=True)]
