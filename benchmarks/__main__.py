"""Runs workloads, their sides in turn, and writes what they measured: ``python -m benchmarks
--help``."""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.cases import changes, newest
from benchmarks.report import write_report

FOLDER = Path(__file__).resolve().parent
CPUINFO = Path("/proc/cpuinfo")
SIDES = ("floor", "ours", "theirs")
NOT_WORKLOADS = {
    "__init__",
    "clients",
    "parts",
    "__main__",
    "cases",
    "plots",
    "protocol",
    "report",
    "steps",
}


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
    parser.add_argument("--results", type=Path, default=FOLDER, help="where to write")
    parser.add_argument(
        "--compare",
        type=Path,
        nargs="?",
        const=Path("newest"),
        metavar="JSON",
        help="write nothing; print what has moved by more than 10 %% against a file of results, by "
        "default the newest in benchmarks/results",
    )
    options = parser.parse_args()
    pythons = dict(given.split("=", 1) for given in options.python)
    names = options.names or [name for name in workloads() if plugin_of(name) == "hf"]
    if unknown := sorted(set(names) - set(workloads())):
        parser.error(f"no workload {', '.join(unknown)}; there are {', '.join(workloads())}")
    rounds = options.rounds or (1 if options.quick else 3)
    runs = [
        run(name, side, turn, pythons, options.model, options.quick)
        for name in names
        for turn in range(rounds)
        for side in sides_of(name)
        if environment_of(name, side) in pythons
    ]
    if options.compare is not None:
        known = FOLDER / "results" if str(options.compare) == "newest" else options.compare
        before = newest(known, slug(machine())) if known.is_dir() else known
        print(f"compared with {before.name}:")
        print("\n".join(changes(json.loads(before.read_text()), {"runs": runs})))
        sys.exit(any("failed" in run for run in runs))
    result = {
        "date": str(datetime.date.today()),
        "machine": machine(),
        "quick": options.quick,
        "runs": runs,
    }
    file = (
        options.results
        / "results"
        / f"{result['date']}-{slug(result['machine'])}{'-quick' if options.quick else ''}.json"
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    result["runs"] = [past for past in earlier(file) if past["workload"] not in names] + runs
    file.write_text(json.dumps(result, indent=1) + "\n")
    report = write_report(result, options.results)
    print(f"{file}\n{report}")


def earlier(file: Path) -> list[dict[str, Any]]:
    """What was measured on this machine until now, as long as the workload is still there."""
    same = file.parent.glob(f"*{file.stem[len('2026-01-01') :]}.json")
    last = max(same, default=None)
    if last is None:
        return []
    result = json.loads(last.read_text())
    known = workloads()
    return [{"date": result["date"]} | run for run in result["runs"] if run["workload"] in known]


def workloads() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_WORKLOADS)


def plugin_of(name: str) -> str:
    return str(says(name, "PLUGIN") or "hf")


def says(name: str, constant: str) -> Any:
    """The value of a constant of the module, if it has it; read, not run."""
    for statement in module(name).body:
        if (
            isinstance(statement, ast.Assign)
            and getattr(statement.targets[0], "id", None) == constant
        ):
            return ast.literal_eval(statement.value)
    return None


def sides_of(name: str) -> list[str]:
    functions = {
        statement.name for statement in module(name).body if isinstance(statement, ast.FunctionDef)
    }
    return [side for side in SIDES if side in functions]


def module(name: str) -> ast.Module:
    return ast.parse((FOLDER / f"{name}.py").read_text())


def environment_of(name: str, side: str) -> str:
    if side != "theirs":
        return plugin_of(name)
    return f"theirs-{plugin_of(name)}" if says(name, "PEER") else "theirs"


def run(
    name: str, side: str, turn: int, pythons: dict[str, str], model: str, quick: bool
) -> dict[str, Any]:
    """One side of a workload, once, in a process of its own."""
    print(f"{name}: {side}, round {turn + 1}", file=sys.stderr, flush=True)
    command = [
        pythons[environment_of(name, side)],
        "-m",
        f"benchmarks.{name}",
        side,
        "--model",
        model,
    ]
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])],
        cwd=FOLDER.parent,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    found: dict[str, Any] = {
        "workload": name,
        "title": (ast.get_docstring(module(name)) or name),
        "side": side,
        "round": turn,
        "date": str(datetime.date.today()),
        "processor": processor(),
    }
    found["load"] = round(os.getloadavg()[0], 2)
    found["cases"] = [one for one in said if "case" in one]
    found["notes"] = [one["note"] for one in said if "note" in one]
    for one in said:
        found |= {key: one[key] for key in ("python", "versions", "peak_mib") if key in one}
    if done.returncode:
        found["failed"] = done.returncode
        print(
            f"{name}: {side} FAILED with exit status {done.returncode}", file=sys.stderr, flush=True
        )
    return found


def machine() -> str:
    """The machine in general words: its processor and cores."""
    named = cpu().get("model name") or platform.processor() or platform.machine()
    return f"{named}, {os.cpu_count()} cores, {platform.system()}"


def processor() -> str:
    """What kind of processor this is. Machines that are lent give several kinds one name, and one
    kind may take half the time of another."""
    said = cpu()
    if not said.keys() >= {"cpu family", "model", "flags"}:
        return platform.processor() or platform.machine()
    flags = said["flags"].split()
    vectors = next((kind for kind in ("avx512_bf16", "avx512f", "avx2") if kind in flags), "sse")
    return f"family {said['cpu family']}, model {said['model']}, {vectors}"


def cpu() -> dict[str, str]:
    """What Linux says of a core; nothing on other systems."""
    lines = CPUINFO.read_text().splitlines() if CPUINFO.exists() else []
    said = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, _, value in said}


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


if __name__ == "__main__":
    main()
