"""``genlm doctor``: what this machine has, and what would be used."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from genlm.core.cli.backends import backend_table
from genlm.core.cli.model import Commands
from genlm.core.cli.processor import timings, usable_processors
from genlm.core.cli.terminal import Progress, table
from genlm.core.errors import BackendNotFoundError
from genlm.core.plugins import available_backends, choose_backend

#: Seconds to wait for a tool of the system.
TOOL_TIMEOUT_SECONDS = 10.0


def add_to(commands: Commands) -> None:
    doctor = commands.add_parser(
        "doctor", help="this machine, its accelerators, backends, caches and threads"
    )
    doctor.set_defaults(run=lambda options: print_findings())


def print_findings() -> int:
    """Print what was found. Imports no engine."""
    print(table([("Python", f"{platform.python_version()} ({sys.executable})"), *machine()]))
    print(f"\n{backend_table()}\n")
    print(f"Without --backend: {choice()}\n")
    print(table(list(caches())))
    progress = Progress()
    progress.show("timing the processor ...")
    found = timings()
    progress.clear()
    print(f"\n{found}")
    return 0


def machine() -> list[tuple[str, str]]:
    """The platform, the processors that this process may use, and the accelerators."""
    usable = usable_processors()
    found = accelerators()
    return [
        ("platform", platform.platform()),
        ("processors", f"{usable} of {os.cpu_count()} may be used"),
        *(("accelerator", name) for name in found or ["none found"]),
    ]


def accelerators() -> list[str]:
    """The accelerators, as the system and its tools name them."""
    found = []
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        found += [f"CUDA: {line}" for line in _lines_of(query)]
    elif Path("/proc/driver/nvidia/version").exists():
        found.append("CUDA: a driver without nvidia-smi")
    if Path("/dev/kfd").exists():
        found.append("ROCm: an AMD GPU")
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        found.append("Metal: Apple silicon")
    return found


def _lines_of(command: list[str]) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"{command[0]} could not be run: {error}"]
    if done.returncode:
        return [f"{command[0]} failed: {(done.stdout + done.stderr).strip()}"]
    return done.stdout.splitlines()


def choice() -> str:
    """The backend that would be chosen, with the reason."""
    try:
        chosen = choose_backend()
    except BackendNotFoundError as error:
        return str(error)
    (highest, _), *rest = available_backends()
    others = [f"{name} ({rank})" for rank, name in rest if rank >= 0]
    named = sorted(name for rank, name in rest if rank < 0)
    why = f"it has the highest preference ({highest}) of those that run here"
    only = f"; only by name: {', '.join(named)}" if named else ""
    return f"{chosen}; {why}{', before ' + ', '.join(others) if others else ''}{only}"


def caches() -> Iterator[tuple[str, str, str]]:
    """The folders where models and compiled code are kept, and their sizes."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    hugging_face = Path(os.environ.get("HF_HOME") or home / "huggingface")
    folders = {
        "models (hub)": Path(os.environ.get("HF_HUB_CACHE") or hugging_face / "hub"),
        "compiled (vLLM)": Path(os.environ.get("VLLM_CACHE_ROOT") or home / "vllm"),
        "compiled (Triton)": Path(
            os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
        ),
        "SmolLM2 (demo)": home / "genlm",
    }
    for what, folder in folders.items():
        yield f"cache: {what}", _size(folder) if folder.is_dir() else "none", _short(folder)


def _short(folder: Path) -> str:
    home = Path.home()
    return f"~/{folder.relative_to(home)}" if folder.is_relative_to(home) else str(folder)


def _size(folder: Path) -> str:
    """The bytes in a folder. A link counts for itself, not for its target."""
    total = 0
    for parent, _, files in os.walk(folder):
        for file in files:
            try:
                total += (Path(parent) / file).lstat().st_size
            except OSError:  # deleted in the meantime
                continue
    return f"{total / 1e6:,.1f} MB"
