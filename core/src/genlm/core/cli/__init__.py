"""The command ``genlm``. One module for each subcommand; engines are imported when one runs.

A distribution adds subcommands by entry points of group ``genlm.commands``. Each names a module
with a function ``add_to(commands)``, which adds its parser.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points

from genlm.core.checks import describe_error
from genlm.core.cli import backends, doctor, sample, top
from genlm.core.cli.backends import PrintVersions
from genlm.core.cli.model import Commands
from genlm.core.errors import GenlmError
from genlm.core.installation import pip_install

#: The subcommands, in the order of ``genlm --help``.
COMMANDS = (sample, top, backends, doctor)

#: Subcommands of other distributions, which may not be installed.
ELSEWHERE = {
    "verify": "genlm-kit",
    **dict.fromkeys(("bench", "conformance", "new-plugin"), "genlm-conformance"),
}

#: The exit status that a shell reports for an interrupted program.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the stream is closed, as by `2>&-`
            setattr(sys, name, open(os.devnull, mode, errors="replace"))  # noqa: SIM115
    # Texts may have characters that the output cannot show.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    given = sys.argv[1:] if arguments is None else arguments
    first = next((word for word in given if not word.startswith("-")), None)
    options = argparse.Namespace(traceback=True)  # used for errors outside of any command
    try:
        try:
            options = parser(first).parse_args(given)
            return int(options.run(options))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader stopped reading, as in `genlm sample ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if options.traceback:
            raise
        print(f"genlm: {_line(error)}", file=sys.stderr)
        return 1


def _line(error: Exception) -> str:
    """The line that the user reads about an error. If it is not one of this project's, the line
    says where to look."""
    if isinstance(error, GenlmError | OSError):
        return str(error)
    text = ", ".join([describe_error(error), *getattr(error, "__notes__", ())])
    return f"{text} (`genlm --traceback ...` shows where)"


def parser(first: str | None = None) -> argparse.ArgumentParser:
    """The parser of all subcommands. If ``first`` is given, only as many of other distributions'
    subcommands are added as this subcommand needs."""
    parser = argparse.ArgumentParser(
        prog="genlm", description="Next-token log-probabilities on any engine."
    )
    parser.add_argument(
        "--version", action=PrintVersions, help="print the versions of the core and of the plugins"
    )
    parser.add_argument(
        "--traceback", action="store_true", help="of an error, show where it was raised"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    if first not in commands.choices:  # importing subcommands of other distributions takes a second
        # A distribution of another version may still have a subcommand that is now the core's.
        given = entry_points(group="genlm.commands")
        installed = [entry for entry in given if entry.name not in commands.choices]
        for entry in [entry for entry in installed if entry.name == first] or installed:
            _add_installed(entry, commands)
    for name, distribution in ELSEWHERE.items():
        if name not in commands.choices:
            _add_missing(name, distribution, commands)
    return parser


def _add_installed(entry: EntryPoint, commands: Commands) -> None:
    """Add the subcommand of another distribution. If it cannot be imported, the others still
    work."""
    try:
        entry.load().add_to(commands)
    except Exception as error:
        print(
            f"genlm: the subcommand {entry.name} is left out: {describe_error(error)}",
            file=sys.stderr,
        )


def _add_missing(name: str, distribution: str, commands: Commands) -> None:
    """Add a subcommand that only says how to install it, whatever follows it."""

    def run(options: argparse.Namespace) -> int:
        print(
            f"genlm: {name} comes with {distribution}; {pip_install(distribution)}", file=sys.stderr
        )
        return 1

    missing = commands.add_parser(name, add_help=False, prefix_chars="\0")
    missing.add_argument("ignored", nargs="*")
    missing.set_defaults(run=run)
