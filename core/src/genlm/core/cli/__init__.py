"""The command ``genlm``. One module for each subcommand; engines are imported when one runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from genlm.core.cli import backends, bench, completion, conformance, doctor, new_plugin, sample, top
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
    except (GenlmError, OSError) as error:
        print(f"genlm: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The parser of every subcommand."""
    parser = argparse.ArgumentParser(
        prog="genlm", description="Next-token log-probabilities on any engine."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in COMMANDS:
        command.add_to(commands)
    parser.set_defaults(parser=parser)  # for what is made from it
    return parser
