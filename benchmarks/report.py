"""RESULTS.md: what was measured, for readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import Case, cases_of, processors_of
from benchmarks.plots import draw


def write_report(result: dict[str, Any], folder: Path) -> Path:
    """Write RESULTS.md and its plots; returns the path."""
    measured = sorted(cases_of(result).items())
    titles = {run["workload"]: run["title"] for run in result["runs"]}
    lines = ["# Results", "", *introduction(result), ""]
    lines += [
        f"- [{workload}](#{workload}): {headline(titles[workload])}" for workload, _ in measured
    ]
    lines += [""]
    for workload, cases in measured:
        runs = [run for run in result["runs"] if run["workload"] == workload]
        text = titles[workload].partition("\n")[2]
        lines += [
            f"## {workload}",
            "",
            f"**{headline(titles[workload])}**",
            "",
            *([text.strip(), ""] if text.strip() else []),
        ]
        lines += [origin(workload, runs, result["date"]), ""]
        lines += [*table(cases), ""]
        for plot in draw(workload, cases, folder / "plots"):
            lines += [f"![{workload}: {plot.stem}](plots/{plot.name})", ""]
        lines += [
            f"- {note}" for note in dict.fromkeys(note for run in runs for note in run["notes"])
        ]
        lines += [
            f"- **{run['side']} failed** in round {run['round'] + 1}."
            for run in runs
            if "failed" in run
        ]
        lines += ["", f"<sub>{versions(runs)}</sub>", ""]
    path = folder / "RESULTS.md"
    path.write_text("\n".join(lines).replace("\n\n\n", "\n\n"))
    return path


def headline(title: str) -> str:
    """The first line of a workload's text."""
    return title.partition("\n")[0].rstrip(".")


def introduction(result: dict[str, Any]) -> list[str]:
    return [
        f"{result['machine']}; made by `nox -s bench`.",
        "",
        "*Ours* is this checkout, *theirs* genlm-backend 0.3.1, the *floor* the raw engine. Sides "
        "took turns, "
        "every time in a new process, with one thread. A figure is the median of the rounds' "
        "medians, "
        "± half the range of these, or of the middle half of the values where there was one round, "
        "if it had more than three. "
        "*Times better* is "
        "theirs over ours for times and sizes, ours over theirs for rates; *above the floor* is "
        "what ours takes beyond "
        "the raw engine.",
        "",
        "The machine was shared: trust ratios before times.",
        *(
            [
                "",
                "**Made with `--quick`: this shows that the workloads run, the figures mean "
                "little.**",
            ]
            * result["quick"]
        ),
    ]


def origin(workload: str, runs: list[dict[str, Any]], date: str) -> str:
    """How these figures are made again, and when and how they were made."""
    rounds = max(run["round"] for run in runs) + 1
    loads = [run["load"] for run in runs]
    dates = " and ".join(sorted({run.get("date", date) for run in runs}))
    turns = "1 round" if rounds == 1 else f"{rounds} rounds"
    load = f"load average {min(loads):.1f} to {max(loads):.1f}"
    (processors,) = processors_of({"runs": runs}).values()
    return (
        f"`nox -s bench -- {workload} --rounds {rounds}`: {dates}, {turns}, {load}, processor: "
        f"{' and '.join(sorted(processors))}."
    )


def table(cases: list[Case]) -> list[str]:
    sides = [
        side for side in ("ours", "theirs", "floor") if any(side in case.values for case in cases)
    ]
    curves = any(case.x is not None for case in cases)
    head = ["case", *(["x"] if curves else []), *sides]
    head += ["times better"] * ("theirs" in sides) + ["above the floor"] * ("floor" in sides)
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for case in cases:
        row = [case.name, *([f"{case.x:g}" if case.x is not None else ""] if curves else [])]
        row += [cell(case, side) for side in sides]
        if "theirs" in sides:
            ratio = case.ratio("theirs")
            row.append(f"{ratio:.3g}" if ratio else "")
        if "floor" in sides:
            ours, floor = case.median("ours"), case.median("floor")
            row.append(f"{100 * (ours / floor - 1):+.0f} %" if ours and floor else "")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def cell(case: Case, side: str) -> str:
    median = case.median(side)
    if median is None:
        return ""
    spread = case.spread(side)
    if spread is None:
        return f"{median:.4g} {case.unit}"
    about = f"{spread:.2g}" if case.unit == "%" or not median else f"{100 * spread / median:.0f} %"
    return f"{median:.4g} {case.unit} ± {about}"


def versions(runs: list[dict[str, Any]]) -> str:
    sides = {run["side"]: run for run in runs if "versions" in run}
    return "; ".join(
        f"{side}: Python {run['python']}, "
        + ", ".join(f"{name} {version}" for name, version in run["versions"].items())
        for side, run in sides.items()
    )
