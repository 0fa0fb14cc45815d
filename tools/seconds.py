"""Print how long each run of nox took: python tools/seconds.py REPORT.json ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(*reports: str) -> str:
    """One line for each run, the longest first, and their sum."""
    sessions = [run for report in reports for run in json.loads(report)["sessions"]]
    rows = [(run["duration"], run.get("signatures") or [run["name"]], run) for run in sessions]
    rows.sort(key=lambda row: -row[0])
    lines = [f"{seconds:8.0f} s  {names[0]}  {run['result']}" for seconds, names, run in rows]
    return "\n".join([*lines, f"{sum(row[0] for row in rows):8.0f} s  all"])


if __name__ == "__main__":
    print(table(*(Path(path).read_text() for path in sys.argv[1:])))
