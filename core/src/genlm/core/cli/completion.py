"""``genlm completion``: what makes a shell complete the command."""

from __future__ import annotations

import argparse
import sys
from importlib.util import find_spec

from genlm.core.cli.arguments import Commands
from genlm.core.installation import CORE, pip_install

SHELLS = ("bash", "zsh", "fish", "tcsh")


def add_to(commands: Commands) -> None:
    completion = commands.add_parser(
        "completion", help="print the script by which a shell completes this command"
    )
    completion.add_argument("shell", choices=SHELLS)
    completion.set_defaults(run=print_script)


def print_script(options: argparse.Namespace) -> int:
    """Print the script, which shtab writes from the parser."""
    if find_spec("shtab") is None:
        remedy = pip_install(CORE, "completion")
        print(f"genlm: completion needs shtab; {remedy}", file=sys.stderr)
        return 1
    import shtab

    print(shtab.complete(options.parser, options.shell))
    return 0
