"""``genlm new-plugin``: a plugin package to start from."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path

from genlm.core.cli.model import Commands


def add_to(commands: Commands) -> None:
    plugin = commands.add_parser("new-plugin", help="write a complete plugin package to start from")
    plugin.add_argument("name", help="the backend's name: what users will type")
    plugin.add_argument("--folder", type=Path, help="where to write it; default genlm-NAME")
    plugin.set_defaults(run=new_plugin)


def new_plugin(options: argparse.Namespace) -> int:
    """Write a plugin package, and say what to do with it."""
    from genlm.conformance.scaffold import write_plugin

    folder = write_plugin(options.name, options.folder)
    install = shlex.join(["pip", "install", "-e", f"{folder}[test]"])
    print(f"wrote {folder}; now: {install} && {shlex.join(['pytest', str(folder)])}")
    return 0
