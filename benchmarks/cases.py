"""What was measured, by case: the values of every round and side."""

from __future__ import annotations

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
        """How many times better ours is than a side: above 1 it is better."""
        ours, other = self.median("ours"), self.median(side)
        if not ours or not other:
            return None
        return ours / other if self.unit.endswith("/s") else other / ours


def cases_of(result: dict[str, Any]) -> dict[str, list[Case]]:
    """The cases of each workload, in the order measured."""
    found: dict[tuple[str, str, float | None], Case] = {}
    for run in result["runs"]:
        cases = [*run["cases"]]
        if "peak_mib" in run:
            cases.append({"case": PEAK, "x": None, "unit": "MiB", "values": [run["peak_mib"]]})
        for said in cases:
            key = (run["workload"], said["case"], said["x"])
            case = found.setdefault(key, Case(*key, said["unit"]))
            case.values.setdefault(run["side"], []).append(said["values"])
    by_workload: dict[str, list[Case]] = {}
    for case in sorted(found.values(), key=lambda case: case.name == PEAK):
        by_workload.setdefault(case.workload, []).append(case)
    return by_workload


def newest(folder: Path, machine: str = "") -> Path:
    """The results of the last day, not of a quick run; of this machine if there are any."""
    files = [file for file in folder.glob("*.json") if not file.stem.endswith("-quick")]
    return max(files, key=lambda file: (file.stem.endswith(f"-{machine}"), file.name))


def changes(before: dict[str, Any], after: dict[str, Any], share: float = 0.1) -> list[str]:
    """What has moved by more than ``share``, one line each, the worst first; then how many cases
    were compared, which workloads had none to compare with, and which another kind of processor.

    Compared is the ratio to the other side where there is one, since the machine may be another
    one or busier; else the value itself. A move within the spread of both runs is left out.
    """
    old = {
        (case.workload, case.name, case.x): case
        for cases in cases_of(before).values()
        for case in cases
    }
    moved = []
    compared = 0
    unknown: dict[str, int] = {}
    for cases in cases_of(after).values():
        for case in cases:
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
    on, was_on = processors_of(after), processors_of(before)
    return lines + [
        f"{name}: measured on another kind of processor before; its times mean little"
        for name, kinds in on.items()
        if was_on.get(name, kinds) != kinds
    ]


def processors_of(result: dict[str, Any]) -> dict[str, set[str]]:
    """The kinds of processor that each workload was measured on."""
    kinds: dict[str, set[str]] = {}
    for run in result["runs"]:
        kinds.setdefault(run["workload"], set()).add(run.get("processor", "not recorded"))
    return kinds


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
