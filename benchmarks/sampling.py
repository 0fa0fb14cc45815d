"""Draw a token from a row of log-probabilities

One row, or 64 in one call, on the processor, whose probabilities fall with the rank as those of
words do. *Ours* is what draws where an engine has no sampler of its own, as hf and mlx. The floor
is what transformers' `generate` does with rows: its own filters, softmax and multinomial.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SIZES = (49_152, 128_256)
COUNTS = (1, 64)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature 0.7": {"temperature": 0.7},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
}


def row_of(size: int) -> Any:
    import torch

    ranks = torch.randperm(size, generator=torch.Generator().manual_seed(0)) + 1
    return (-1.2 * ranks.float().log()).log_softmax(-1)


def ours(bench: Bench) -> None:
    from genlm.core.drawer import TokenDrawer, draw_together
    from genlm.core.sampling import checked_params

    def measure(case: str, size: int, count: int, options: dict[str, Any]) -> None:
        drawers = [TokenDrawer(checked_params(1, [], **options)) for _ in range(count)]
        rows = [row_of(size)] * count
        call = partial(draw_together, drawers, rows)
        bench.time(case, call, unit="us", x=size, repeat=200 // count, per=count)

    for_each(measure)


def floor(bench: Bench) -> None:
    import torch
    import transformers

    filters: dict[str, Any] = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }

    def draw(rows: torch.Tensor, changes: list[Any]) -> list[list[int]]:
        for change in changes:
            rows = change(None, rows)
        drawn: list[list[int]] = torch.multinomial(rows.softmax(-1), num_samples=1).tolist()
        return drawn

    def measure(case: str, size: int, count: int, options: dict[str, Any]) -> None:
        rows = row_of(size).repeat(count, 1)
        changes = [filters[name](value) for name, value in options.items()]
        call = partial(draw, rows, changes)
        bench.time(case, call, unit="us", x=size, repeat=200 // count, per=count)

    for_each(measure)


def for_each(measure: Callable[[str, int, int, dict[str, Any]], None]) -> None:
    for size in SIZES:
        for way, options in OPTIONS.items():
            for count in COUNTS:
                case = f"{way}, {count} together" if count > 1 else way
                measure(case, size, count, options)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
