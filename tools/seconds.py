"""Print how long each session of nox took: python tools/seconds.py REPORT.json ..."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def table(*reports: str) -> str:
    """One line for each session, the longest first, and their sum."""
    sessions = [said for report in reports for said in json.loads(report)["sessions"]]
    rows = [(said["duration"], said.get("signatures") or [said["name"]], said) for said in sessions]
    rows.sort(key=lambda row: -row[0])
    lines = [f"{seconds:8.0f} s  {names[0]}  {said['result']}" for seconds, names, said in rows]
    return "\n".join([*lines, f"{sum(row[0] for row in rows):8.0f} s  all"])


if __name__ == "__main__":
    print(table(*(Path(path).read_text() for path in sys.argv[1:])))
