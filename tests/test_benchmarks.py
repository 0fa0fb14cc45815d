"""What the benchmarks print of a comparison."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cases import changes

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def results(ours: float, theirs: float | None = None, unit: str = "ms") -> dict[str, Any]:
    sides = {"ours": ours, "theirs": theirs}
    return {
        "runs": [
            {
                "workload": "trie",
                "side": side,
                "cases": [{"case": "sum", "x": 8, "unit": unit, "values": [value]}],
            }
            for side, value in sides.items()
            if value is not None
        ]
    }


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (results(10), results(10.5), "nothing has moved"),
        (results(10), results(20), "0.50 times, WORSE: trie: sum at 8"),
        (results(10), results(5), "2.00 times, better"),
        (results(10, unit="rows/s"), results(5, unit="rows/s"), "0.50 times, WORSE"),
        # The whole machine is twice as slow.
        (results(10, 40), results(20, 80), "nothing has moved"),
        (results(10, 40), results(20, 40), "0.50 times, WORSE: trie: sum at 8 (against theirs)"),
    ],
)
def test_what_has_moved(before: dict[str, Any], after: dict[str, Any], said: str) -> None:
    (line,) = changes(before, after)
    assert said in line


def test_the_committed_results_compare_with_themselves() -> None:
    for file in RESULTS.glob("*.json"):
        result = json.loads(file.read_text())
        assert changes(result, result) == ["nothing has moved by more than 10%"]
