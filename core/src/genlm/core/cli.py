"""The command ``genlm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from genlm.core.errors import BackendImportError, GenlmError, PluginError
from genlm.core.plugins import backend_names, find_backend


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    parser = argparse.ArgumentParser(prog="genlm", description="Next-token log-probabilities on any engine.")
    commands = parser.add_subparsers(dest="command", required=True)
    backends = commands.add_parser("backends", help="list what is installed, what can run here, and why not")
    backends.set_defaults(run=lambda options: print_backends())
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except GenlmError as error:
        print(f"genlm: {error}", file=sys.stderr)
        return 1


def print_backends() -> int:
    """Print one line for each installed backend. Imports no engine."""
    rows = [("backend", "plugin", "engine", "runs here")]
    rows += [_backend_row(name) for name in backend_names()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return 0


def _backend_row(name: str) -> tuple[str, str, str, str]:
    try:
        backend = find_backend(name)
        info = backend.info()
    except (BackendImportError, PluginError) as error:
        return name, "?", "?", f"no: {error}"
    engine = f"{info.engine} {_version(info.engine)}".rstrip()
    return name, backend.distribution, engine, "yes" if info.available else f"no: {info.unavailable}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
