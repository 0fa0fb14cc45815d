"""Requests of several kinds at once on SGLang: engine steps that a short one waits for a long one.

See the workload `mixed`, which is the same on vLLM. Scores are read from rows, one for each token.
"""

from __future__ import annotations

from benchmarks.mixed import measure
from benchmarks.protocol import Bench, main

PLUGIN = "sgl"


def ours(bench: Bench) -> None:
    measure(bench, "sgl", {"engine_opts": {"max_total_tokens": 8192}})


if __name__ == "__main__":
    main(ours=ours)
