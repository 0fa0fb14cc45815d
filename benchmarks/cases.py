"""The results by case: the values of every round and side."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from attrs import define, field

#: A case that every workload has.
PEAK = "peak memory of the process"


@define
class Case:
    """One case of a workload: the values of every round, by side."""

    workload: str
    name: str
    x: float | None
    unit: str
    values: dict[str, list[list[float]]] = field(factory=dict)

    def median(self, side: str) -> float | None:
        """The median of the rounds' medians."""
        rounds = self.values.get(side)
        return statistics.median(map(statistics.median, rounds)) if rounds else None

    def spread(self, side: str) -> float | None:
        """Half the range of the rounds' medians, or of the middle half of an only round's values;
        ``None`` where a round has too few values to tell."""
        rounds = self.values[side]
        medians = [statistics.median(values) for values in rounds]
        if len(rounds) == 1:
            if len(rounds[0]) <= 3:
                return None
            medians = statistics.quantiles(rounds[0], n=4)
        return (max(medians) - min(medians)) / 2

    def ratio(self, side: str) -> float | None:
        """How many times better ours is than another side; above 1 it is better."""
        ours, other = self.median("ours"), self.median(side)
        if not ours or not other:
            return None
        return ours / other if self.unit.endswith("/s") else other / ours


def record(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """One workload's runs, as they are kept: for each case and side the median of every round, or
    all values of an only round."""
    rounds = 1 + max(run["round"] for run in runs)
    cases: dict[tuple[str, float | None], dict[str, Any]] = {}
    for run in runs:
        measured = [*run["cases"]]
        if "peak_mib" in run:
            measured.append({"case": PEAK, "x": None, "unit": "MiB", "values": [run["peak_mib"]]})
        for case in measured:
            key = case["case"], case["x"]
            kept = cases.setdefault(key, {"name": key[0], "x": key[1], "unit": case["unit"]})
            values = case["values"] if rounds == 1 else [statistics.median(case["values"])]
            kept.setdefault("values", {}).setdefault(run["side"], []).append(
                [float(f"{value:.8g}") for value in values]
            )
    return {
        "workload": runs[0]["workload"],
        "machine": runs[0]["machine"],
        "date": max(run["date"] for run in runs),
        "rounds": rounds,
        "loads": [min(run["load"] for run in runs), max(run["load"] for run in runs)],
        "processors": sorted({run["processor"] for run in runs}),
        "versions": {
            run["side"]: {"Python": run["python"], **run["versions"]}
            for run in runs
            if "versions" in run
        },
        "notes": list(dict.fromkeys(note for run in runs for note in run["notes"])),
        "failed": [[run["side"], run["round"]] for run in runs if "failed" in run],
        "cases": sorted(cases.values(), key=lambda case: case["name"] == PEAK),
    }


def read(file: Path) -> list[dict[str, Any]]:
    """The records of a file: one line for each workload and machine."""
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def write(records: list[dict[str, Any]], file: Path) -> None:
    records = sorted(records, key=lambda kept: (kept["machine"], kept["workload"]))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(f"{json.dumps(kept)}\n" for kept in records), encoding="utf-8")


def newest(records: list[dict[str, Any]], machine: str = "") -> list[dict[str, Any]]:
    """One record for each workload: that of this machine if there is one, otherwise the last."""
    ordered = sorted(records, key=lambda kept: (kept["machine"] == machine, kept["date"]))
    return list({kept["workload"]: kept for kept in ordered}.values())


def cases_of(kept: dict[str, Any]) -> list[Case]:
    """The cases of a record, in the order measured."""
    return [Case(workload=kept["workload"], **case) for case in kept["cases"]]


def changes(
    before: list[dict[str, Any]], after: list[dict[str, Any]], share: float = 0.1
) -> list[str]:
    """A line for each case that changed by more than ``share``, worst first; then how many cases
    were compared, which workloads had nothing to compare with, and which were measured on another
    kind of processor.

    The ratio to the other side is compared, if there is one, since the machine may be another one
    or busier; otherwise the value itself. A change within the spread of both runs is left out.
    """
    old = {(case.workload, case.name, case.x): case for kept in before for case in cases_of(kept)}
    moved = []
    compared = 0
    unknown: dict[str, int] = {}
    for kept in after:
        for case in cases_of(kept):
            known = old.get((case.workload, case.name, case.x))
            if known is None or not (change := moves(known, case)):
                unknown[case.workload] = unknown.get(case.workload, 0) + 1
                continue
            compared += 1
            factor, side = change
            if abs(factor - 1) > max(share, noise(known, side) + noise(case, side)):
                at = "" if case.x is None else f" at {case.x:g}"
                word = "better" if factor > 1 else "WORSE"
                basis = f"against {side}" if side else "the value itself"
                line = f"{factor:6.2f} times, {word}: {case.workload}: {case.name}{at} ({basis})"
                moved.append((factor, line))
    lines = [line for _, line in sorted(moved)]
    lines.append(f"{compared} cases compared, {len(moved)} moved by more than {share:.0%}")
    lines += [
        f"{name}: {count} cases had nothing to compare with" for name, count in unknown.items()
    ]
    was_on = {kept["workload"]: kept["processors"] for kept in before}
    return lines + [
        f"{name}: measured on another kind of processor before; its times mean little"
        for kept in after
        if was_on.get(name := kept["workload"], kept["processors"]) != kept["processors"]
    ]


def moves(before: Case, after: Case) -> tuple[float, str | None] | None:
    """How many times better a case has become, and against which side if there is one."""
    for side in ("theirs", "floor"):
        old, new = before.ratio(side), after.ratio(side)
        if old and new:
            return new / old, side
    old, new = before.median("ours"), after.median("ours")
    if not old or not new:
        return None
    return (new / old if after.unit.endswith("/s") else old / new), None


def noise(case: Case, side: str | None) -> float:
    """The spread of ours, and of the side it is held against, as shares of their medians."""
    return sum(
        (case.spread(name) or 0.0) / median
        for name in ("ours", side)
        if name is not None and (median := case.median(name))
    )
