"""Writes RESULTS.md: the results, for readers."""

from __future__ import annotations

from typing import Any

from benchmarks.cases import Case, cases_of
from benchmarks.workloads import title_of


def text_of(records: list[dict[str, Any]]) -> str:
    """The page on one machine's records."""
    records = sorted(records, key=lambda kept: str(kept["workload"]))
    titles = {kept["workload"]: title_of(kept["workload"]) for kept in records}
    lines = ["# Results", "", *introduction(records[0]["machine"]), ""]
    lines += [f"- [{name}](#{name}): {headline(title)}" for name, title in titles.items()]
    lines += [""]
    for kept in records:
        name = kept["workload"]
        text = titles[name].partition("\n")[2]
        lines += [f"## {name}", "", f"**{headline(titles[name])}**", ""]
        lines += [*([text.strip(), ""] if text.strip() else []), origin(kept), ""]
        lines += [*table(cases_of(kept)), "", f"<!-- plots: {name} -->", ""]
        lines += [f"- {note}" for note in kept["notes"]]
        lines += [f"- **{side} failed** in round {turn + 1}." for side, turn in kept["failed"]]
        lines += ["", f"<sub>{versions(kept)}</sub>", ""]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def headline(title: str) -> str:
    """The first line of a workload's text."""
    return title.partition("\n")[0].rstrip(".")


def introduction(machine: str) -> list[str]:
    return [
        f"{machine}; made by `nox -s bench`.",
        "",
        "*Ours* is this checkout, *theirs* genlm-backend 0.3.1, the *floor* the raw engine. Sides "
        "took turns, every time in a new process, with one thread. A figure is the median of the "
        "rounds' medians, ± half the range of these, or of the middle half of the values where "
        "there was one round, if it had more than three. *Times better* is theirs over ours for "
        "times and sizes, ours over theirs for rates; *above the floor* is what ours takes beyond "
        "the raw engine.",
        "",
        "The machine was shared: trust ratios before times. [Runs](RUNS.md) has what "
        "was run on a GPU, and for longer.",
    ]


def origin(kept: dict[str, Any]) -> str:
    """How to reproduce these figures, and when and how they were made."""
    rounds = kept["rounds"]
    turns = "1 round" if rounds == 1 else f"{rounds} rounds"
    least, most = kept["loads"]
    return (
        f"`nox -s bench -- {kept['workload']} --rounds {rounds}`: {kept['date']}, {turns}, load "
        f"average {least:.1f} to {most:.1f}, processor: {' and '.join(kept['processors'])}."
    )


def table(cases: list[Case]) -> list[str]:
    measured = {side for case in cases for side in case.values}
    sides = [side for side in ("ours", "theirs", "floor") if side in measured]
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


def versions(kept: dict[str, Any]) -> str:
    return "; ".join(
        f"{side}: " + ", ".join(f"{name} {version}" for name, version in known.items())
        for side, known in kept["versions"].items()
    )
