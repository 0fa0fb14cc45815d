"""The command ``genlm``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from genlm.core.errors import BackendImportError, GenlmError, PluginError
from genlm.core.plugins import backend_names, find_backend


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except (GenlmError, OSError) as error:
        print(f"genlm: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="genlm", description="Next-token log-probabilities on any engine."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    backends = commands.add_parser(
        "backends", help="list what is installed, what can run here, and why not"
    )
    backends.set_defaults(run=lambda options: print_backends())

    conformance = commands.add_parser(
        "conformance", help="check a backend against every clause of the contract"
    )
    conformance.add_argument("backend", help="the name of an installed backend")
    conformance.add_argument(
        "--model", required=True, help="a path or hub name, as the backend takes it"
    )
    conformance.add_argument(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="a LoRA adapter of the model; give two or more",
    )
    conformance.add_argument(
        "--dtype",
        help="what the model computes in; it sets the tolerance only (the backend is told by "
        "--option dtype=...)",
    )
    conformance.add_argument("--atol", type=float, help="the tolerance of probabilities")
    conformance.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a further option of the backend, as JSON",
    )
    conformance.add_argument("--quick", action="store_true", help="a tenth of the examples")
    conformance.add_argument(
        "--effort", type=float, default=1.0, help="multiplies the examples; 10 looks deeper"
    )
    conformance.add_argument("--seed", type=int, default=0, help="chooses the examples")
    conformance.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a report to publish: FILE.html or FILE.json",
    )
    conformance.add_argument("--json", action="store_true", help="print the result as JSON")
    conformance.set_defaults(run=run_conformance)

    plugin = commands.add_parser("new-plugin", help="write a complete plugin package to start from")
    plugin.add_argument("name", help="the backend's name: what users will type")
    plugin.add_argument("--folder", type=Path, help="where to write it; default genlm-NAME")
    plugin.set_defaults(run=new_plugin)
    return parser


def print_backends() -> int:
    """Print one line for each installed backend. Imports no engine."""
    rows = [("backend", "plugin", "engine", "runs here")]
    rows += [_backend_row(name) for name in backend_names()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        )
    return 0


def _backend_row(name: str) -> tuple[str, str, str, str]:
    try:
        backend = find_backend(name)
        info = backend.info()
    except (BackendImportError, PluginError) as error:
        return name, "?", "?", f"no: {error}"
    engine = f"{info.engine} {_version(info.engine)}".rstrip()
    return (
        name,
        backend.distribution,
        engine,
        "yes" if info.available else f"no: {info.unavailable}",
    )


def _version(name: str) -> str:
    try:
        return version(name)
    except (PackageNotFoundError, ValueError):  # the latter where the plugin names no distribution
        return ""


def run_conformance(options: argparse.Namespace) -> int:
    """Run the conformance suite, which needs packages that the core does not."""
    missing = [name for name in ("hypothesis", "pytest") if find_spec(name) is None]
    if missing:
        print(
            f"genlm: the suite needs {' and '.join(missing)}; pip install "
            "'genlm-core[conformance]'",
            file=sys.stderr,
        )
        return 1
    from genlm.core.conformance.command import run_command

    return run_command(options)


def new_plugin(options: argparse.Namespace) -> int:
    """Write a plugin package, and say what to do with it."""
    from genlm.core.scaffold import write_plugin

    folder = write_plugin(options.name, options.folder)
    print(f"wrote {folder}; now: pip install -e '{folder}[test]' && pytest {folder}")
    return 0
