"""Draw a token from a row of log-probabilities

One row, on the processor, whose probabilities fall with the rank as those of words do. *Ours* is
what draws where an engine has no sampler of its own, as hf and mlx. The floor is what transformers'
`generate` does with a row: its own filters, softmax and multinomial.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from benchmarks.protocol import Bench, main

PLUGIN = "hf"

SIZES = (49_152, 128_256)
WAYS: dict[str, dict[str, Any]] = {
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
    from genlm.core.drawer import TokenDrawer
    from genlm.core.sampling import checked_params

    for size in SIZES:
        row = row_of(size)
        for way, options in WAYS.items():
            drawer = TokenDrawer(checked_params(1, [], **options))
            bench.time(way, partial(drawer.draw, row), unit="us", x=size, repeat=200)


def floor(bench: Bench) -> None:
    import torch
    import transformers

    filters: dict[str, Any] = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }

    def draw(rows: torch.Tensor, changes: list[Any]) -> int:
        for change in changes:
            rows = change(None, rows)
        return int(torch.multinomial(rows.softmax(-1), num_samples=1))

    for size in SIZES:
        rows = row_of(size)[None]
        for way, options in WAYS.items():
            changes = [filters[name](value) for name, value in options.items()]
            bench.time(way, partial(draw, rows, changes), unit="us", x=size, repeat=200)


if __name__ == "__main__":
    main(ours=ours, floor=floor)
