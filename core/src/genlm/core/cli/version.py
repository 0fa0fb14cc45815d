"""``genlm --version``: the versions of the core and of the installed plugins."""

from __future__ import annotations

import argparse
import platform
from importlib.metadata import entry_points, version
from typing import Any

from genlm.core.installation import CORE
from genlm.core.plugins import BACKENDS, distribution


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
