"""The list of installed backends: ``genlm backends``, which also says why one cannot run here, and
``genlm --version``."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any

from genlm.core.cli.model import Commands
from genlm.core.cli.terminal import table
from genlm.core.errors import BackendImportError, PluginError
from genlm.core.installation import CORE, pip_install
from genlm.core.plugins import BACKENDS, KNOWN, backend_names, distribution, find_backend


def add_to(commands: Commands) -> None:
    backends = commands.add_parser(
        "backends", help="list what is installed or could be, what can run here, and why not"
    )
    backends.set_defaults(run=lambda options: print_backends())


def print_backends() -> int:
    """Print the table. Imports no engine."""
    print(backend_table())
    return 0


def backend_table() -> str:
    """A line for each installed backend, then one for each plugin that could be installed."""
    installed = backend_names()
    header = ("backend", "plugin", "engine", "runs here")
    absent = [
        (name, "-", "-", f"not installed: {pip_install(KNOWN[name])}")
        for name in KNOWN
        if name not in installed
    ]
    return table([header, *map(_backend_row, installed), *absent])


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
    except (PackageNotFoundError, ValueError):  # ValueError if the plugin names no distribution
        return ""


class PrintVersions(argparse.Action):
    """Prints them, and ends the program. Imports no plugin."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *given: object) -> None:
        print(versions())
        parser.exit()


def versions() -> str:
    """A line for each distribution, the core first, and one for Python."""
    core = f"{CORE} {version(CORE)}"
    others = {distribution(entry_point) for entry_point in entry_points(group=BACKENDS)} - {core}
    return "\n".join([core, *sorted(others), f"Python {platform.python_version()}"])
