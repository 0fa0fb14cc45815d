"""What was measured, by case: the values of every round and side."""

from __future__ import annotations

import statistics
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

    def spread(self, side: str) -> float:
        """Half the range of the rounds' medians, or of the middle half of an only round's
        values."""
        rounds = self.values[side]
        medians = [statistics.median(values) for values in rounds]
        if len(rounds) == 1 and len(rounds[0]) > 3:
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
