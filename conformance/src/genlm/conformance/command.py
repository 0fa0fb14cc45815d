"""``genlm conformance``: the suite from the command line."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

from genlm.conformance.advice import check_excuses
from genlm.conformance.compare import ATOL, Violation
from genlm.conformance.model import imported
from genlm.conformance.report import Report, Verdict, run
from genlm.conformance.suite import ConformanceSuite
from genlm.core.cli.model import named, parsed
from genlm.core.cli.terminal import Progress
from genlm.core.errors import GenlmError, InvalidOptionError

#: The effort of ``--quick``.
QUICK_EFFORT = 0.1

#: Options that are attributes of the suite.
SUITE_OPTIONS = (
    "backend", "model", "seed", "longest", "window", "patience", "deadline", "reference",
    "ignores_tokens", "text_is_normalised",
)  # fmt: skip

#: Exit codes.
CONFORMS, DOES_NOT_CONFORM, BAD_ARGUMENTS, NOT_LOADED = 0, 1, 2, 3


def run_command(options: argparse.Namespace) -> int:
    """Run the suite.

    Returns:
        The exit code: 0 if the backend conforms, 1 if it does not, 2 if the arguments are wrong,
        3 if the model could not be loaded.
    """
    try:
        suite = suite_of(options)
        write = _writer(options.report)
        with _ending(suite), contextlib.closing(suite.subject()) as subject:
            subject.until = math.inf  # The time of the run begins after the import.
            backend = imported(suite.backend, subject)
            if suite.reference is not None:
                imported(suite.reference, subject)
    except Violation as hangs:
        report = Report(suite.backend, str(suite.model), (), not_loaded=str(hangs))
        return _tell(report, options.json, write)
    except (GenlmError, OSError) as error:
        print(f"genlm: {error}", file=sys.stderr)
        return BAD_ARGUMENTS
    width = 2 + max(len(name) for name in suite.clauses) - len("test_")
    out = sys.stdout
    if not options.json:
        print(f"{backend.name} ({backend.distribution}) on {suite.model}\n", file=out)

    progress, done = Progress(), itertools.count(1)

    def show(verdict: Verdict) -> None:
        progress.clear()
        if not options.json:
            print(line(verdict, width), file=out, flush=True)
        progress.show(f"{next(done)} of {len(suite.clauses)} clauses ...")

    progress.show(f"loading {suite.model} on {backend.name} ...")
    # The output of the engine and of the log is not part of the result.
    with contextlib.redirect_stdout(sys.stderr), _ending(suite):
        report = run(suite, show)
    progress.clear()
    return _tell(report, options.json, write)


def _tell(report: Report, as_json: bool, write: Callable[[Report], None]) -> int:
    """Print and write what came of it.

    Returns:
        The exit code.
    """
    if as_json:
        print(json.dumps(report.as_dict(), indent=2))
    else:
        advice = report.advice()
        print("\n".join(["", *([advice, ""] if advice else []), report.summary()]))
    write(report)
    if report.not_loaded is not None:
        return NOT_LOADED
    return CONFORMS if report.conforms else DOES_NOT_CONFORM


@contextlib.contextmanager
def _ending(suite: ConformanceSuite) -> Iterator[None]:
    """End the process, and print where its threads are, where a run goes on long after its
    deadline: code of the engine holds the interpreter's lock, and no line of Python runs."""
    seconds = 1.25 * suite.deadline * max(1.0, suite.effort) + 2 * suite.patience
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _writer(path: Path | None) -> Callable[[Report], None]:
    """A function that writes the report to a file. A file that cannot be written fails before the
    suite runs."""
    if path is None:
        return lambda report: None
    formats: dict[str, Callable[[Report], str]] = {
        ".html": Report.as_html,
        ".json": lambda report: json.dumps(report.as_dict(), indent=2),
    }
    if path.suffix not in formats:
        raise InvalidOptionError(f"--report must end in {' or '.join(formats)}; got {str(path)!r}")
    path.touch()

    def write(report: Report) -> None:
        path.write_text(formats[path.suffix](report), encoding="utf-8")

    return write


def suite_of(options: argparse.Namespace) -> ConformanceSuite:
    """The suite that the arguments describe.

    Raises:
        InvalidOptionError: an argument is not accepted.
    """
    if options.dtype is not None and options.dtype not in ATOL:
        raise InvalidOptionError(f"--dtype must be one of {', '.join(ATOL)}; got {options.dtype!r}")
    for name in ("effort", "patience", "deadline", "longest", "window", "atol"):
        value = getattr(options, name)
        if value is not None and not value > 0:
            raise InvalidOptionError(f"--{name} must be more than 0; got {value:g}")
    suite = ConformanceSuite()
    for name in SUITE_OPTIONS:
        setattr(suite, name, getattr(options, name))
    suite.adapters = dict(named("--adapter", given) for given in options.adapter)
    suite.atol = options.atol if options.atol is not None else ATOL[options.dtype or "float32"]
    suite.options = dict(parsed("--option", given) for given in options.option)
    suite.effort = QUICK_EFFORT if options.quick else options.effort
    suite.second_model = not options.no_second_model
    suite.excused = dict(named("--excuse", given) for given in options.excuse)
    check_excuses(suite.excused)
    return suite


def line(verdict: Verdict, width: int) -> str:
    """A row of the table; a counterexample follows it, indented."""
    status = verdict.status.upper() if verdict.status == "failed" else verdict.status
    row = f"{verdict.clause:{width}}{status:8}"
    if verdict.status == "passed":
        return f"{row} {verdict.seconds:6.1f} s {verdict.rows:6} rows"
    if verdict.status == "skipped":
        return f"{row} {verdict.detail}"
    return f"{row}\n{textwrap.indent(verdict.detail, '    ')}"
