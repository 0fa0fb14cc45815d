"""Plots that read well on their own: one SVG for each curve of a workload that compares sides, and
bars of where the time goes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.cases import Case, cases_of, newest, read

COLOURS = {"ours": "#0b6e4f", "theirs": "#c8553d", "floor": "#8d99ae"}
NAMES = {"ours": "genlm-core", "theirs": "genlm-backend 0.3.1", "floor": "raw engine"}
STAGE = "stage: "


def draw(workload: str, cases: list[Case], folder: Path) -> list[Path]:
    """Draw a workload's curves and its stages; returns the files."""
    import matplotlib

    matplotlib.use("svg")
    folder.mkdir(parents=True, exist_ok=True)
    curves: dict[str, list[Case]] = {}
    stages: list[Case] = []
    for case in cases:
        if case.name.startswith(STAGE):
            stages.append(case)
        elif case.x is not None:
            curves.setdefault(case.name, []).append(case)
    drawn = [
        curve(workload, name, points, folder)
        for name, points in curves.items()
        if len({point.x for point in points}) > 2
        and len({side for point in points for side in point.values}) > 1
    ]
    return drawn + ([bars(workload, stages, folder)] if stages else [])


def curve(workload: str, name: str, points: list[Case], folder: Path) -> Path:
    figure, axes = canvas(f"{workload}: {name}")
    for side, colour in COLOURS.items():
        known = [(point.x, point.median(side)) for point in points if side in point.values]
        if known:
            xs, ys = zip(*sorted(known), strict=True)
            axes.plot(xs, ys, "o-", color=colour, label=NAMES[side], linewidth=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks(axes, sorted({point.x for point in points if point.x is not None}))
    axes.set_ylabel(points[0].unit)
    axes.grid(True, which="major", color="#e5e5e5")
    axes.legend(frameon=False)
    return save(figure, folder / f"{workload}-{slug(name)}.svg")


def gain(results: Path, to: Path) -> Path:
    """The plot of page one: a step of n contexts of 200 tokens on hf, by all sides."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "genlm"  # equal figures give an identical file
    (kept,) = (kept for kept in newest(read(results)) if kept["workload"] == "hf_step")
    points = [case for case in cases_of(kept) if case.name == "extend after 200 tokens"]
    figure, axes = canvas("A step of SmolLM2-135M: contexts of 200 tokens grow by one token")
    for side, colour in COLOURS.items():
        known = sorted((p.x, p.median(side)) for p in points if side in p.values and p.x)
        xs, ys = zip(*known, strict=True)
        name = "raw transformers" if side == "floor" else NAMES[side]
        axes.plot(xs, ys, "--" if side == "floor" else "o-", color=colour, label=name, linewidth=2)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks(axes, sorted({point.x for point in points if point.x is not None}))
    axes.set_xlabel("contexts in a step")
    axes.set_ylabel("milliseconds (one thread of a CPU)")
    axes.grid(True, which="major", color="#e5e5e5")
    axes.legend(frameon=False)
    figure.savefig(to, metadata={"Date": None})
    return to


def bars(workload: str, stages: list[Case], folder: Path) -> Path:
    """One bar for each ``x``, made of its stages."""
    figure, axes = canvas(f"{workload}: where the time goes")
    groups = sorted({case.x for case in stages if case.x is not None})
    left = dict.fromkeys(groups, 0.0)
    for name in dict.fromkeys(case.name for case in stages):
        own = {
            case.x: case.median("ours") or 0.0
            for case in stages
            if case.name == name and case.x is not None
        }
        label = name.removeprefix(STAGE)
        axes.barh(
            [f"{x:g}" for x in groups],
            [own.get(x, 0) for x in groups],
            left=list(left.values()),
            label=label,
            height=0.6,
        )
        left = {x: left[x] + own.get(x, 0.0) for x in groups}
    axes.set_xlabel(f"{stages[0].unit} per request")
    axes.set_ylabel("concurrent requests")
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return save(figure, folder / f"{workload}-stages.svg")


def canvas(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def ticks(axes: Any, at: Iterable[float]) -> None:
    places = list(at)
    axes.set_xticks(places, [f"{place:,.10g}" for place in places])
    axes.minorticks_off()


def save(figure: Any, path: Path) -> Path:
    figure.savefig(path)
    return path


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    print(gain(root / "benchmarks" / "results.jsonl", root / "docs" / "assets" / "gain.svg"))
