"""The protocol of a workload: one JSON object a line on standard output. Standard library only,
for all environments.

A workload is a module with one function per side, each of which takes a :class:`Bench`::

    def ours(bench: Bench) -> None:
        from genlm.core import load_model_by_name  # engines and models are imported inside
        lm = load_model_by_name(bench.model, backend="hf")
        bench.time("extend 32 contexts", lambda: ..., unit="ms", prepare=lambda: ...)

    if __name__ == "__main__":
        main(ours=ours, theirs=theirs, floor=floor)
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

#: Seconds in a unit. A rate ("tokens/s") or a size ("MiB") is recorded unchanged.
UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}

#: The distributions whose versions are part of a result.
NAMED = (
    "accelerate",
    "genlm-",
    "llguidance",
    "mlx",
    "numba",
    "numpy",
    "ray",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
    "vllm",
)


class Bench:
    """Measures, and prints the results.

    Attributes:
        side: ``"ours"``, ``"theirs"`` or ``"floor"``.
        quick: Whether to do only enough to show that the workload runs.
        model: The folder of a small real model.
        backend: The requested engine, if a workload runs on several.
        clock: The clock, in seconds: wall time, unless a workload sets ``time.process_time``.
    """

    def __init__(self, side: str, quick: bool, model: str, backend: str | None = None) -> None:
        self.side = side
        self.quick = quick
        self.model = model
        self.backend = backend
        self.clock: Callable[[], float] = time.perf_counter

    def time(
        self,
        case: str,
        call: Callable[..., object],
        *,
        unit: str = "ms",
        x: float | None = None,
        repeat: int = 20,
        warm: int = 1,
        per: int = 1,
        prepare: Callable[[], object] | None = None,
    ) -> float:
        """Time a call ``repeat`` times (at most 3 with ``--quick``) after ``warm`` that are not
        counted; return the median, in ``unit``.

        Args:
            case: The name of what is measured, equal on every side.
            call: Called with the result of ``prepare``, or without arguments if that is not given.
            unit: ``"s"``, ``"ms"``, ``"us"`` or ``"ns"``.
            x: The position on a curve: cases of one name and different ``x`` are one curve.
            repeat: How many times.
            warm: How many calls before them are not counted.
            per: How many operations one call does; times are for one operation.
            prepare: Prepares one call. Its time is not counted.
        """
        values = []
        for _ in range(warm + (min(repeat, 3) if self.quick else repeat)):
            arguments = () if prepare is None else (prepare(),)
            began = self.clock()
            call(*arguments)
            values.append((self.clock() - began) / per / UNITS[unit])
        self.record(case, values[warm:], unit=unit, x=x)
        return statistics.median(values[warm:])

    def record(
        self, case: str, values: Sequence[float] | float, *, unit: str, x: float | None = None
    ) -> None:
        """Record values that were measured in another way: those of all repetitions, or a single
        one."""
        values = [values] if isinstance(values, int | float) else list(values)
        self._say(case=case, x=x, unit=unit, values=[round(value, 6) for value in values])

    def note(self, text: str) -> None:
        """Add a note for the reader of the results."""
        self._say(note=text)

    def about(self) -> None:
        """Record a description of this environment."""
        found = {str(one.metadata["Name"]).lower(): one.version for one in distributions()}
        named = {name: version for name, version in sorted(found.items()) if name.startswith(NAMED)}
        self._say(python=platform.python_version(), versions=named)

    def peak(self) -> None:
        """Record the peak memory of this process, or of a process that it started."""
        most = max(
            resource.getrusage(who).ru_maxrss
            for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
        )
        self._say(peak_mib=round(most / (1 << 20 if sys.platform == "darwin" else 1 << 10), 1))

    def _say(self, **fields: Any) -> None:
        print(json.dumps(fields), flush=True)


def main(**sides: Callable[[Bench], None]) -> None:
    """Run one side of a workload: ``python -m benchmarks.<workload> ours --model FOLDER
    --quick``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=sorted(sides))
    model = Path.home() / ".cache" / "genlm" / "smollm2-135m-instruct"
    parser.add_argument("--model", default=str(model))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--backend", help="the engine, for a workload that runs on several")
    options = parser.parse_args()
    bench = Bench(options.side, options.quick, options.model, options.backend)
    bench.about()
    gc.collect()
    sides[options.side](bench)
    bench.peak()
