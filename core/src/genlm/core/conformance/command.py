"""``genlm conformance``: the suite from the command line."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
from typing import Any

from genlm.core.conformance.compare import ATOL
from genlm.core.conformance.report import Verdict, run
from genlm.core.conformance.suite import ConformanceSuite
from genlm.core.errors import InvalidOptionError
from genlm.core.plugins import find_backend

#: The effort of ``--quick``.
QUICK = 0.1


def run_command(options: argparse.Namespace) -> int:
    """Run the suite as told; returns the exit code: 0 if the backend conforms."""
    backend = find_backend(options.backend)
    suite = suite_of(options)
    width = 2 + max(len(name) for name in suite.clauses) - len("test_")
    out = sys.stdout
    if not options.json:
        print(f"{backend.name} ({backend.distribution}) on {suite.model}\n", file=out)

    def tell(verdict: Verdict) -> None:
        if not options.json:
            print(line(verdict, width), file=out, flush=True)

    # What the engine and the log print in the meantime is not part of the result.
    with contextlib.redirect_stdout(sys.stderr):
        report = run(suite, tell)
    print(
        json.dumps(report.as_dict(), indent=2) if options.json else f"\n{report.summary()}",
        file=out,
    )
    return 0 if report.conforms else 1


def suite_of(options: argparse.Namespace) -> ConformanceSuite:
    """The suite that the arguments describe."""
    suite = ConformanceSuite()
    suite.backend = options.backend
    suite.model = options.model
    suite.adapters = dict(_named("--adapter", given) for given in options.adapter)
    suite.atol = (
        options.atol
        if options.atol is not None
        else ATOL.get(options.dtype or "float32", ATOL["float32"])
    )
    suite.options = dict(_parsed("--option", given) for given in options.option)
    suite.effort = QUICK if options.quick else 1.0
    return suite


def line(verdict: Verdict, width: int) -> str:
    """A row of the table; a counterexample follows it, indented."""
    status = verdict.status.upper() if verdict.status == "failed" else verdict.status
    row = f"{verdict.clause:{width}}{status:8}"
    if verdict.status == "passed":
        return f"{row} {verdict.seconds:6.1f} s"
    if verdict.status == "skipped":
        return f"{row} {verdict.detail}"
    return f"{row}\n{textwrap.indent(verdict.detail, '    ')}"


def _named(flag: str, given: str) -> tuple[str, str]:
    name, separator, value = given.partition("=")
    if not (name and separator and value):
        raise InvalidOptionError(f"{flag} {given!r}: give {flag} NAME=VALUE")
    return name, value


def _parsed(flag: str, given: str) -> tuple[str, Any]:
    name, value = _named(flag, given)
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value  # a string needs no quotes
