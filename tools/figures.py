"""Tables and plots of measured figures for the pages of the site, from the newest results.

``tools/blocks.py`` writes the tables into the pages. A page of the site has a line
``<!-- plots: WORKLOAD -->`` where the plots of a workload belong; they are made when the site is
built.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from benchmarks.cases import Case, cases_of, newest, read

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results.jsonl"
MARK = re.compile(r"^<!-- plots: (\w+) -->$", re.MULTILINE)

#: The workload of a step on each backend.
STEPS = {"hf": "hf_step", "vllm": "vllm_step", "sgl": "sgl_step", "mlx": "mlx_step"}


class Figures:
    """Medians of ours, by workload, case and position."""

    def __init__(self, results: Path = RESULTS) -> None:
        self._cases = {
            (case.workload, case.name, case.x): case
            for kept in newest(read(results))
            for case in cases_of(kept)
        }

    def of(self, workload: str, name: str, x: float | None) -> float | None:
        case: Case | None = self._cases.get((workload, name, x))
        return case.median("ours") if case else None


def with_plots(page: str, folder: Path) -> str:
    """A page with plots in place of their marks, which are written to ``folder``, beside the
    page."""
    return MARK.sub(lambda mark: plots(mark[1], folder), page)


def plots(workload: str, folder: Path) -> str:
    """Links to the plots of a workload, which are drawn."""
    from benchmarks.plots import draw

    (kept,) = (kept for kept in newest(read(RESULTS)) if kept["workload"] == workload)
    drawn = draw(workload, cases_of(kept), folder)
    return "\n\n".join(f"![{plot.stem}]({folder.name}/{plot.name})" for plot in drawn)


def steps(figures: Figures) -> str:
    """Milliseconds of a step of n contexts, by backend."""
    head = ["contexts in a step", *STEPS]
    rows = [
        [f"{n}, after {length} tokens"]
        + [
            formatted(figures.of(workload, f"extend after {length} tokens", n), "ms")
            for workload in STEPS.values()
        ]
        for length in (20, 200)
        for n in (1, 8, 32)
    ]
    return table(head, rows)


def dtypes(figures: Figures) -> str:
    """How a step in bfloat16 compares with one in float32."""
    rows = []
    for n in (1, 8, 32, 64):
        float32, bfloat16 = (
            figures.of("dtype", f"a step, {dtype}", n) for dtype in ("float32", "bfloat16")
        )
        ratio = float32 / bfloat16 if float32 and bfloat16 else None
        rows.append(
            [str(n), formatted(float32, "ms"), formatted(bfloat16, "ms"), formatted(ratio, "times")]
        )
    return table(["contexts in a step", "float32", "bfloat16", "bfloat16 is faster"], rows)


def compiled(figures: Figures) -> str:
    """The cost and the gain of ``torch.compile`` for hf."""
    n, name = 32, "float32, compiled"
    plain = figures.of("dtype", "a step, float32", n)
    step = figures.of("dtype", f"a step, {name}", n)
    ratio = plain / step if plain and step else None
    load = figures.of("dtype", f"the load, {name}", None)
    first = figures.of("dtype", f"the first step, {name}", n)
    head = ["contexts in a step", "float32", "compiled", "compiled is faster"]
    cells = [str(n), formatted(plain, "ms"), formatted(step, "ms"), formatted(ratio, "times")]
    head += ["the load, compiled", "the first step, compiled"]
    return table(head, [[*cells, formatted(load, "s"), formatted(first, "s")]])


def islands(figures: Figures) -> str:
    """The share of the ideal rate that n islands of 8 and 64 particles reach: 20 ms a batch."""
    rows = []
    for n in (1, 2, 4, 8):
        shares = []
        for each in (8, 64):
            name = f"tokens a second of n islands, {each} particles each"
            rate = figures.of("islands", name, n)
            shares.append("not measured" if rate is None else f"{rate / (n * each / 0.02):.0%}")
        rows.append([str(n), *shares])
    return table(["islands", "8 particles each", "64 particles each"], rows)


def formatted(value: float | None, unit: str) -> str:
    """A figure as readers need it, with two digits or more."""
    if value is None:
        return "not measured"
    return f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[Figures], str]] = {
    "steps": steps,
    "dtypes": dtypes,
    "compiled": compiled,
    "islands": islands,
}
