"""Running the suite without pytest's runner, and what came of it, clause by clause."""

from __future__ import annotations

import contextlib
import platform
import time
import traceback
from collections.abc import Callable
from html import escape
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import pytest
from attrs import asdict, field, frozen

from genlm.conformance.compare import Violation, origin
from genlm.conformance.model import imported
from genlm.conformance.properties import violation_in
from genlm.conformance.subject import Subject
from genlm.conformance.suite import INVOLVED_CLAUSES, OneModel, clause_names
from genlm.core.errors import GenlmError

#: How many of the clauses that were skipped for one reason are named.
NAMED_CLAUSES = 6

Status = Literal["passed", "skipped", "failed"]


@frozen
class Verdict:
    """The outcome of one clause.

    Attributes:
        clause: Its name.
        status: What came of it.
        detail: Why it was skipped, or the counterexample.
        seconds: How long it took.
        rows: How many rows the engine computed for it.
        deviation: The largest difference of a probability from the cold row's.
        violation: Whether it failed because something was wrong, and not by another error.
    """

    clause: str
    status: Status
    detail: str
    seconds: float
    rows: int = 0
    deviation: float = 0.0
    violation: bool = False


@frozen
class Report:
    """The outcome of the suite.

    Attributes:
        backend: Its name.
        model: What was loaded.
        verdicts: One for each clause that was run, in the order of the suite.
        not_loaded: Why the model could not be loaded; then there are no verdicts.
        setting: The versions, the platform, the seed, and what else the verdicts depend on.
    """

    backend: str
    model: str
    verdicts: tuple[Verdict, ...]
    not_loaded: str | None = None
    setting: dict[str, str] = field(factory=dict)

    @property
    def conforms(self) -> bool:
        """Whether the model could be loaded, and no clause failed."""
        return self.not_loaded is None and not self.failed

    @property
    def failed(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "failed")

    @property
    def skipped(self) -> tuple[Verdict, ...]:
        return tuple(verdict for verdict in self.verdicts if verdict.status == "skipped")

    @property
    def first(self) -> Verdict | None:
        """Of the clauses that failed, the one to read first: one that says what is wrong, and not
        one in which everything meets. The others may have failed of the same fault."""
        involved = {name.removeprefix("test_"): at for at, name in enumerate(INVOLVED_CLAUSES)}
        return min(
            self.failed,
            key=lambda one: (not one.violation, involved.get(one.clause, -1)),
            default=None,
        )

    def summary(self) -> str:
        """The verdict in one line."""
        if self.not_loaded is not None:
            return f"{self.backend} could not be loaded: {self.not_loaded}"
        total, failed, skipped = len(self.verdicts), len(self.failed), len(self.skipped)
        seconds = sum(verdict.seconds for verdict in self.verdicts)
        outcome = "conforms" if self.conforms else "DOES NOT CONFORM"
        if excused := self.setting.get("excused"):
            outcome += f" (excused from: {excused})"
        return (
            f"{self.backend} {outcome}: {total} clauses, {total - failed - skipped} passed, "
            f"{skipped} skipped, {failed} failed, in {seconds:.0f} s{self._longest()}"
        )

    def _longest(self) -> str:
        """The length up to which contexts were tested, as the end of a line."""
        looked = self.setting.get("longest context")
        return f"; looked at contexts of up to {looked} tokens" if looked else ""

    def advice(self) -> str:
        """The failure to read first, and the skipped clauses with what they need; empty if there is
        neither."""
        lines = []
        if self.first is not None:
            others = len(self.failed) - 1
            who = f"the {others} others" if others > 1 else "the other one"
            perhaps = f"; {who} may fail of the same fault" if others else ""
            lines.append(f"Read {self.first.clause} first{perhaps}.")
        reasons: dict[str, list[str]] = {}
        for verdict in self.skipped:
            reasons.setdefault(verdict.detail, []).append(verdict.clause)
        if reasons:
            lines.append("Skipped:")
        for reason, clauses in reasons.items():
            more = len(clauses) - NAMED_CLAUSES
            named = [*clauses[:NAMED_CLAUSES], f"{more} more"] if more > 1 else clauses
            lines.append(f"  {', '.join(named)}: {reason}")
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        first = self.first and self.first.clause
        found = {"conforms": self.conforms, "summary": self.summary(), "read_first": first}
        return {**found, **asdict(self)}

    def as_html(self) -> str:
        """All of it as one page, without anything from elsewhere."""
        setting = "".join(
            f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
            for name, value in self.setting.items()
        )
        rows = "".join(
            f'<tr class="{v.status}"><td>{v.clause}</td><td>{v.status}</td>'
            f"<td>{v.seconds:.1f}</td><td>{v.rows}</td>"
            f"<td>{v.deviation:.1e}</td><td><pre>{escape(v.detail)}</pre></td></tr>"
            for v in self.verdicts
        )
        return PAGE.format(
            title=escape(f"{self.backend} on {self.model}"),
            summary=escape(self.summary()),
            advice=escape(self.advice()),
            setting=setting,
            rows=rows,
        )


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Conformance: {title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em }}
table {{ border-collapse: collapse; margin: 1em 0 }}
td, th {{ border-bottom: 1px solid #ddd; padding: .2em .8em; text-align: left }}
pre {{ margin: 0; white-space: pre-wrap; font-size: 13px }}
.failed td {{ background: #fde8e8 }} .skipped td {{ color: #777 }}
</style>
<h1>{title}</h1><p><strong>{summary}</strong></p><pre>{advice}</pre>
<table>{setting}</table>
<table><tr><th>clause</th><th>verdict</th><th>seconds</th><th>rows</th>
<th>largest deviation of a probability</th><th></th></tr>{rows}</table></html>
"""


def run(
    suite: OneModel,
    on_verdict: Callable[[Verdict], None] = lambda verdict: None,
    only: Callable[[str], bool] = lambda clause: True,
) -> Report:
    """Run the clauses on one live model, in the order of the suite.

    Args:
        suite: An instance of a class that inherits the suite.
        on_verdict: Called with each verdict as it comes.
        only: Whether to run the clause of this name, for instance ``"row_is_normalised"``.
    """
    verdicts = []
    with contextlib.closing(suite.subject()) as subject:
        try:
            setting = _setting(suite, subject)
        except Exception as error:
            kind = "" if isinstance(error, Violation) else f"{type(error).__name__}: "
            reason = f"{kind}{error}"
            return Report(suite.backend, str(suite.model), (), not_loaded=reason)
        for name in clause_names(type(suite)):
            if only(name.removeprefix("test_")):
                verdicts.append(_verdict(suite, name, subject))
                on_verdict(verdicts[-1])
        if subject.looked and subject.looked < subject.contexts.limit:
            of = f" of {subject.contexts.limit}" if setting["max_context"] != "none" else ""
            setting["longest context"] = f"{subject.looked}{of}"
    return Report(suite.backend, str(suite.model), tuple(verdicts), setting=setting)


def _setting(suite: OneModel, subject: Subject) -> dict[str, str]:
    lm = subject.lm  # loads the model
    try:
        backend = imported(suite.backend, subject)
        info = subject.wait(subject.thread(backend.info), "genlm_backend_info()")
        plugin, engine = backend.distribution, info.engine
    except GenlmError:  # a model that was made in another way
        plugin, engine = "not installed", ""
    limit = lm.max_context
    return {
        "plugin": plugin,
        "engine": f"{engine} {_version(engine)}".strip(),
        "core": f"genlm-core {_version('genlm-core')}",
        "PyTorch": _version("torch"),
        "Python": platform.python_version(),
        "platform": platform.platform(),
        "vocabulary": f"{len(lm.byte_vocab)} tokens",
        "max_context": "none" if limit is None else f"{limit} tokens",
        "adapters": ", ".join(subject.adapters) or "none given",
        "tolerance": f"{suite.atol:g}",
        "effort": f"{suite.effort:g}",
        "seed": str(suite.seed),
        **({"excused": ", ".join(suite.excused)} if suite.excused else {}),
    }


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except (PackageNotFoundError, ValueError):
        return ""


def _verdict(suite: OneModel, name: str, subject: Subject) -> Verdict:
    began, rows = time.perf_counter(), subject.model.rows
    status: Status = "passed"
    detail, violation = "", False
    try:
        given = () if name == "test_no_clause_is_missing" else (subject.begin(suite),)
        getattr(suite, name)(*given)
    except pytest.skip.Exception as skipped:
        status, detail = "skipped", str(skipped)
    except Exception as error:
        status, detail = "failed", counterexample(error)
        violation = violation_in(error) is not None
    seconds, rows = time.perf_counter() - began, max(0, subject.model.rows - rows)
    clause = name.removeprefix("test_")
    return Verdict(clause, status, detail, seconds, rows, subject.expect.deviation, violation)


def counterexample(error: BaseException) -> str:
    """The message of an exception, with the example that Hypothesis has noted on it."""
    lines = traceback.format_exception_only(error)
    if isinstance(error, BaseExceptionGroup):
        lines += [f"{counterexample(cause)}\n" for cause in error.exceptions]
    elif (origin_of := origin(error)) and origin_of not in lines[0]:
        lines[0] = f"{lines[0].rstrip()}{origin_of}\n"
    said = "".join(lines).removeprefix(f"{type(error).__module__}.").strip()
    if isinstance(error, Violation):  # The names of its kinds say nothing to an author.
        said = f"{Violation.__name__}{said.removeprefix(type(error).__name__)}"
    return said
