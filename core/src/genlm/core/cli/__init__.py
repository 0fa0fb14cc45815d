"""The command ``genlm``. One module for each subcommand; engines are imported when one runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from genlm.core.checks import describe_error
from genlm.core.cli import backends, bench, completion, conformance, doctor, new_plugin, sample, top
from genlm.core.cli.version import PrintVersions
from genlm.core.errors import GenlmError

#: In the order of ``genlm --help``.
COMMANDS = (sample, top, bench, doctor, backends, conformance, new_plugin, completion)

#: What a shell reports of a program that was interrupted.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    options = parser().parse_args(arguments)
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has seen enough: `genlm sample ... | head`
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
    """What the user reads of an error. One that no message was written for says where to look."""
    if isinstance(error, GenlmError | OSError):
        return str(error)
    text = ", ".join([describe_error(error), *getattr(error, "__notes__", ())])
    return f"{text} (`genlm --traceback ...` shows where)"


def parser() -> argparse.ArgumentParser:
    """The parser of every subcommand."""
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
    parser.set_defaults(parser=parser)  # for what is made from it
    return parser
