"""How much the suite bites: every mutant against every clause.

    python -m tests.conformance.bite [--effort quick|default|both] [--jobs 1] [PATTERN ...]

A mutant is caught if a clause finds something wrong. It is caught by accident if its clauses fail
only for another reason: a mistake in its own code, a hang that is not its fault, a missing package.
Accidents are listed apart, and do not count.

Of faults that the same clause catches in the same way, one is kept.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import logging
import multiprocessing
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec

from attrs import frozen

from genlm.conformance import ConformanceSuite
from genlm.conformance.report import Verdict, run
from genlm.conformance.subject import SHRINKING_SECONDS
from genlm.core.mock import ContinuousMockEngine, MockEngine

from .blind import BLIND, SOUND
from .faulty import PATIENCE_SECONDS, Faulty, OfABlindEngine, OfARealModel, OfTheMock, of_a_mutant
from .mutants import MUTANTS
from .mutants.contention import Woken
from .mutants.working_engine import WorkingEngine

EFFORTS = {"quick": 0.1, "default": 1.0}

#: How long a run of the suite may take, seconds.
DEADLINE_SECONDS = 900.0

#: Clauses that look at the plugin's module or at the class that inherits the suite, not at an
#: engine.
CLAUSES_WITHOUT_ENGINE = (
    "import_of_plugin_imports_no_engine",
    "no_clause_is_missing",
    "unknown_option_is_refused",
)


#: Exceptions that tell of a mistake in the code of a mutant, not of its fault.
MISTAKES = re.compile(
    r"\b(AttributeError|ImportError|ModuleNotFoundError|NameError|NotImplementedError|TypeError"
    r"|UnboundLocalError)\b"
)

#: What the suite says of a request without an answer, and of a run whose time is over.
HANGS = re.compile(r"it hangs, or is so slow|the time of the whole run was over")


@frozen
class Bite:
    """The outcome of one mutant at one effort.

    Attributes:
        name: Its name.
        effort: The name of the effort.
        caught: What the clauses say that found something wrong.
        accidents: What the clauses say that failed for another reason.
        seconds: How long the suite took.
        of_clauses: How long each clause took, in seconds.
    """

    name: str
    effort: str
    caught: Mapping[str, str]
    accidents: Mapping[str, str]
    seconds: float
    of_clauses: Mapping[str, float] = {}

    def __str__(self) -> str:
        found = ", ".join(self.caught) or "-"
        apart = "; ".join(f"{clause} ({accident(said)})" for clause, said in self.accidents.items())
        apart = apart and f"  by accident: {apart}"
        return f"{self.effort:8}{self.name:45}{self.seconds:6.1f} s  {found}{apart}"


def accident(said: str) -> str:
    """In a word or two, why a clause failed that found nothing wrong."""
    mistake = MISTAKES.search(said)
    return mistake[0] if mistake else "hang" if HANGS.search(said) else said[:60].split(":")[0]


def is_accident(verdict: Verdict, may_hang: bool) -> bool:
    """Whether a clause failed for another reason than a fault of the engine.

    Args:
        verdict: The outcome of the clause.
        may_hang: Whether the fault of the engine is that it never answers something.
    """
    hung = not may_hang and HANGS.search(verdict.detail)
    return bool(not verdict.violation or hung or MISTAKES.search(verdict.detail))


def suites(real: bool = True) -> dict[str, Callable[[float], Faulty]]:
    """The suite on every mutant, by name; those of a real model too where genlm-hf is installed."""
    made: dict[str, Callable[[float], Faulty]] = {
        f"mock.{name}": functools.partial(of_a_mutant, mutant) for name, mutant in MUTANTS.items()
    }
    for name, mutant in BLIND.items():
        made[f"blind.{name}"] = functools.partial(OfABlindEngine, mutant.engine)
    if real and has_hf():
        from .mutants import of_a_real_model

        for name, mutant in of_a_real_model.MUTANTS.items():
            made[f"hf.{name}"] = functools.partial(OfARealModel, mutant.engine)
    return made


def has_hf() -> bool:
    """Whether genlm-hf is installed, and what adapters are made with."""
    return all(map(find_spec, ("genlm.hf", "transformers", "peft")))


def hanging() -> frozenset[str]:
    """The names of the mutants whose fault is that they never answer something."""
    groups = {"mock": MUTANTS, "blind": BLIND}
    return frozenset(
        f"{group}.{name}"
        for group, mutants in groups.items()
        for name, mutant in mutants.items()
        if mutant.hangs
    )


def clean() -> dict[str, Callable[[float], Faulty]]:
    """The suite on engines without fault."""
    made: dict[str, Callable[[float], Faulty]] = {
        "clean.mock": functools.partial(OfTheMock, MockEngine),
        "clean.continuous": functools.partial(OfTheMock, ContinuousMockEngine),
        "clean.working": functools.partial(OfTheMock, WorkingEngine),
        "clean.woken": functools.partial(OfTheMock, Woken),
        **{f"clean.{name}": functools.partial(OfABlindEngine, SOUND[name]) for name in SOUND},
    }
    if has_hf():
        from genlm.hf.engine import HFEngine

        made["clean.hf"] = functools.partial(OfARealModel, HFEngine)
    return made


def bite(
    name: str, effort: str, only: str = "", seed: int = 0, first: bool = False, read: bool = False
) -> Bite:
    """Run the suite on one mutant; with ``first`` until a clause fails. Counterexamples are made
    simple only where somebody reads them."""
    known = clean() if name.startswith("clean.") else suites(real=name.startswith("hf."))
    suite = known[name](EFFORTS[effort])
    suite.seed = seed
    suite.patience = PATIENCE_SECONDS
    suite.deadline = DEADLINE_SECONDS
    suite.shrinking = SHRINKING_SECONDS if read else 0.0
    told: list[Verdict] = []
    may_hang = name in hanging()

    def is_caught(verdict: Verdict) -> bool:
        return verdict.status == "failed" and not is_accident(verdict, may_hang)

    def wanted(clause: str) -> bool:
        if first and any(map(is_caught, told)):
            return False
        return clause not in CLAUSES_WITHOUT_ENGINE and bool(re.search(only, clause))

    began = time.process_time()
    with silent():
        report = run(suite, told.append, wanted)
    caught = {one.clause: one.detail for one in report.failed if is_caught(one)}
    accidents = {one.clause: one.detail for one in report.failed if one.clause not in caught}
    if report.not_loaded is not None:
        accidents["(not loaded)"] = report.not_loaded
    seconds = {verdict.clause: verdict.seconds for verdict in report.verdicts}
    return Bite(name, effort, caught, accidents, time.process_time() - began, seconds)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Inside the block, nothing is logged, and nothing is written to standard error."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logging.disable(disabled)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each mutant, and what was caught of all at each effort."""
    parser = argparse.ArgumentParser(description="how much the conformance suite bites")
    parser.add_argument("pattern", nargs="*", help="of the mutants' names; default all")
    parser.add_argument("--effort", choices=[*EFFORTS, "both"], default="both")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--only", default="", help="a pattern of the clauses to run")
    parser.add_argument("--clean", type=int, default=0, help="seeds to run the clean engines with")
    parser.add_argument("--first-seed", type=int, default=0, help="the first of these seeds")
    parser.add_argument("--first", action="store_true", help="stop at the first clause that fails")
    parser.add_argument("--verbose", action="store_true", help="print the counterexamples")
    options = parser.parse_args(arguments)
    efforts = list(EFFORTS) if options.effort == "both" else [options.effort]
    known = clean() if options.clean else suites()
    chosen = [
        name for name in known if not options.pattern or any(p in name for p in options.pattern)
    ]
    seeds = range(options.first_seed, options.first_seed + (options.clean or 1))
    how = options.first, options.verbose
    work = [(n, e, options.only, s, *how) for e in efforts for s in seeds for n in chosen]
    bites = []
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=8) as pool:
        jobs = [pool.apply_async(bite, job) for job in work]
        for job, (name, effort, *_) in zip(jobs, work, strict=True):
            try:
                one = job.get(timeout=2 * DEADLINE_SECONDS)
            except Exception as error:  # A mutant must not end the run of the others.
                failed = {"(not run)": f"{type(error).__name__}: {error}"}
                one = Bite(name, effort, {}, failed, 0.0)
            bites.append(one)
            print(one, flush=True)
            if options.verbose:
                for clause, detail in {**one.caught, **one.accidents}.items():
                    print(f"    {clause}: {detail[:1500]}")
    if not options.clean:
        print(table(bites, whole=not (options.first or options.only)))
    return int(bool(options.clean and any(one.caught or one.accidents for one in bites)))


def table(bites: Sequence[Bite], whole: bool) -> str:
    """Caught of total at each effort; and what each clause catches, where all were run."""
    lines = []
    for effort in dict.fromkeys(one.effort for one in bites):
        of_effort = [one for one in bites if one.effort == effort]
        missed = [one.name for one in of_effort if not one.caught]
        apart = [one.name for one in of_effort if one.accidents and not one.caught]
        share = 1 - len(missed) / len(of_effort)
        caught = len(of_effort) - len(missed)
        lines += [
            f"{effort:8} {caught} of {len(of_effort)} caught, {share:.0%}",
            f"{effort:8} missed: {', '.join(missed) or 'none'}",
            f"{effort:8} of these, caught by accident only: {', '.join(apart) or 'none'}",
        ]
        if whole:
            lines += [f"{effort:8} {line}" for line in by_clause(of_effort)]
    return "\n".join(lines)


def by_clause(bites: Sequence[Bite]) -> list[str]:
    """For each clause how many mutants it catches, the seconds that it takes where it does not, and
    those that no other clause catches; and how long it takes until a clause fails."""
    names = [name.removeprefix("test_") for name in ConformanceSuite.clauses]
    names = [name for name in names if name not in CLAUSES_WITHOUT_ENGINE]
    caught = Counter(clause for one in bites for clause in one.caught)
    alone: dict[str, list[str]] = {}
    for one in bites:
        if len(one.caught) == 1:
            alone.setdefault(*one.caught, []).append(one.name.rpartition(".")[2])
    lines = [f"{'':46}caught seconds alone"]
    for name in names:
        ran = [
            one for one in bites if name in one.of_clauses
        ]  # Some runs ended before this clause.
        took = [one.of_clauses[name] for one in ran if name not in one.caught]
        seconds = statistics.median(took or [0.0])
        lines.append(f"{name:46}{caught[name]:6}{seconds:8.2f} {', '.join(alone.get(name, '-'))}")
    until = [sum(_until_it_fails(one)) for one in bites if one.caught] or [0.0]
    lines.append(
        f"until a clause fails: {statistics.median(until):.1f} s in the median, "
        f"{statistics.mean(until):.1f} s on average"
    )
    have = sum(name in alone for name in names)
    lines.append(f"{have} of {len(names)} clauses catch something alone")
    return lines


def _until_it_fails(one: Bite) -> Iterator[float]:
    for clause, seconds in one.of_clauses.items():
        yield seconds
        if clause in one.caught:
            return


if __name__ == "__main__":
    sys.exit(main())
