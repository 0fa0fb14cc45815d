"""Runs workloads, their sides in turn, and writes what they measured: ``python -m benchmarks
--help``."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import changes, newest, read, record, write
from benchmarks.report import text_of
from benchmarks.workloads import environment_of, plugin_of, sides_of, workloads

FOLDER = Path(__file__).resolve().parent
RESULTS = FOLDER / "results.jsonl"
CPUINFO = Path("/proc/cpuinfo")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="workloads; without any, all of the core and of hf"
    )
    parser.add_argument("--quick", action="store_true", help="only see that they run")
    parser.add_argument("--rounds", type=int, help="how often each side's turn comes")
    parser.add_argument("--model", required=True, help="the folder of a small real model")
    parser.add_argument(
        "--python",
        action="append",
        default=[],
        metavar="ENVIRONMENT=PYTHON",
        help="hf=..., theirs=...",
    )
    parser.add_argument("--results", type=Path, help="the folder to write to")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="?",
        const=RESULTS,
        metavar="FILE",
        help="write nothing; print what has moved by more than 10 %% against these results, by "
        "default those of the repository",
    )
    options = parser.parse_args()
    pythons = dict(given.split("=", 1) for given in options.python)
    names = options.names or [name for name in workloads() if plugin_of(name) == "hf"]
    if unknown := sorted(set(names) - set(workloads())):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(workloads())}")
    rounds = options.rounds or (1 if options.quick else 3)
    runs = [
        [
            run(name, side, turn, pythons, options.model, options.quick)
            for turn in range(rounds)
            for side in sides_of(name)
            if environment_of(name, side) in pythons
        ]
        for name in names
    ]
    measured = [record(of_one) for of_one in runs if of_one]
    if options.compare is not None:
        before = newest(read(options.compare), machine())
        print(f"compared with {options.compare}:")
        print("\n".join(changes(before, measured)))
        sys.exit(any(kept["failed"] for kept in measured))
    # Quick figures are imprecise, so they do not replace others.
    folder = options.results or (FOLDER.parent / "build/benchmarks" if options.quick else FOLDER)
    file = folder / RESULTS.name
    again = {(kept["machine"], kept["workload"]) for kept in measured}
    records = [
        kept
        for kept in read(file)
        if (kept["machine"], kept["workload"]) not in again and kept["workload"] in workloads()
    ] + measured
    write(records, file)
    report = folder / "RESULTS.md"
    report.write_text(text_of([kept for kept in records if kept["machine"] == machine()]))
    print(f"{file}\n{report}")


def run(
    name: str, side: str, turn: int, pythons: dict[str, str], model: str, quick: bool
) -> dict[str, Any]:
    """Run one side of a workload once, in a process of its own."""
    print(f"{name}: {side}, round {turn + 1}", file=sys.stderr, flush=True)
    command = [pythons[environment_of(name, side)], "-m", f"benchmarks.{name}", side]
    command += ["--model", model, *["--quick"] * quick]
    done = subprocess.run(command, cwd=FOLDER.parent, stdout=subprocess.PIPE, text=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = {
        "workload": name,
        "machine": machine(),
        "side": side,
        "round": turn,
        "date": str(datetime.date.today()),
        "processor": processor(),
        "load": round(os.getloadavg()[0], 2),
        "cases": [one for one in lines if "case" in one],
        "notes": [one["note"] for one in lines if "note" in one],
    }
    for one in lines:
        found |= {key: one[key] for key in ("python", "versions", "peak_mib") if key in one}
    if done.returncode:
        found["failed"] = status = done.returncode
        print(f"{name}: {side} FAILED with exit status {status}", file=sys.stderr, flush=True)
    return found


def machine() -> str:
    """The machine in general words: its processor and cores."""
    named = cpu().get("model name") or platform.processor() or platform.machine()
    return f"{named}, {os.cpu_count()} cores, {platform.system()}"


def processor() -> str:
    """The kind of processor. Rented machines give several kinds the same name, although one may be
    twice as fast as another."""
    facts = cpu()
    if not facts.keys() >= {"cpu family", "model", "flags"}:
        return platform.processor() or platform.machine()
    flags = facts["flags"].split()
    vectors = next((kind for kind in ("avx512_bf16", "avx512f", "avx2") if kind in flags), "sse")
    return f"family {facts['cpu family']}, model {facts['model']}, {vectors}"


def cpu() -> dict[str, str]:
    """Linux's description of a core; empty on other systems."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    facts = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in facts}


if __name__ == "__main__":
    main()
