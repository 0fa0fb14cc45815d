"""Runs tasks of nox, several at a time, and prints a table at the end: what ran, how long, what was
skipped and why."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

#: The messages in a log about skipped work: by nox, by a task itself, by pytest.
SKIPPED = re.compile(
    r"^nox > Session .+? skipped: (?P<task>.+)$"
    r"|^nox > (?P<part>.+ is missing.*)$"
    r"|^SKIPPED \[(?P<count>\d+)\] (?P<file>[^ ]+?):(?:\d+:)? (?P<reason>.+)$",
    re.MULTILINE,
)

#: A skipped clause is not a missing test, because the engine does not claim what the clause checks.
CLAUSES = "genlm/conformance/"


@dataclass
class Done:
    """A task that has ended: its result in one word, its seconds, and its log."""

    name: str
    result: str
    seconds: float
    log: str

    def skipped(self) -> list[str]:
        """The skipped parts and the reasons; each reason once."""
        reasons: dict[str, int] = {}
        for found in SKIPPED.finditer(self.log):
            if CLAUSES not in (found["file"] or "").replace(os.sep, "/"):
                reason = found["task"] or found["part"] or found["reason"]
                reasons[reason] = reasons.get(reason, 0) + int(found["count"] or 0)
        return [f"{reason} ({n} tests)" if n else reason for reason, n in reasons.items()]


def run(named: Mapping[str, Sequence[str]], folder: Path, at_once: int) -> bool:
    """Run the tasks, each with its arguments. Print the log of each when it ends, then the table.
    Returns whether all passed."""
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    done: list[Done] = []

    def one(name: str) -> None:
        done.append(ended := run_one(name, named[name], folder))
        print(f"{ended.log}\n{name}: {ended.result}, {ended.seconds:.0f} s\n", flush=True)

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, named))
    wall = time.monotonic() - began
    print(f"{table(done)}\n{wall:8.0f}  all, {at_once} at a time\n", flush=True)
    failed = [task.name for task in done if task.result == "failed"]
    print(f"{len(done) - len(failed)} passed, {len(failed)} failed", flush=True)
    return not failed


def run_one(name: str, arguments: Sequence[str], folder: Path) -> Done:
    """Run one task in a nox of its own."""
    report, log = folder / f"{name}.json", folder / f"{name}.log"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "nox", "--report", str(report), "-s", name, "--", *arguments]
    # The running nox has all that the noxfile needs, so the nested one must not install it.
    environment = {**os.environ, "NOX_SCRIPT_MODE": "none", "PYTHONUTF8": "1"}
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
        ).returncode
    seconds = time.monotonic() - began
    sessions = json.loads(report.read_text())["sessions"] if report.exists() else []
    results = {session["result"] for session in sessions}
    result = "failed" if code else results.pop() if len(results) == 1 else "success"
    return Done(name, result, seconds, log.read_text(encoding="utf-8", errors="replace"))


def table(done: Sequence[Done]) -> str:
    """A line for each task, the longest first, with what was skipped below it."""
    lines = [f"{'seconds':>8}  task"]
    for task in sorted(done, key=lambda task: -task.seconds):
        lines.append(f"{task.seconds:8.0f}  {task.name}: {task.result}")
        lines += [f"{'':12}skipped: {reason}" for reason in task.skipped()]
    return "\n".join(lines)
