"""The soak program finds the faults that it looks for."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from genlm.conformance import ConformanceSuite
from genlm.core import hookimpl
from tools.soak import Soak, usage

from .conftest import run_python
from .doubles import Processor

pytestmark = pytest.mark.any_version

#: A soak run over an engine whose fifth call does not return.
STUCK = """
import sys
import threading
from genlm.core import hookimpl
from tests.test_soak import soak

class Stuck:
    calls = 0

    @hookimpl
    def genlm_call_begins(self, hook):
        self.calls += hook == "HOOK"
        if self.calls == CALLS:
            threading.Event().wait()

sys.exit(not soak(minutes=0.05, wrappers=[Stuck()], patience=1.0).run())
"""


def soak(minutes: float = 0.02, patience: float = 120.0, **options: Any) -> Soak:
    suite = ConformanceSuite()
    suite.backend = suite.model = "mock"
    suite.adapters = {"first": "first", "second": "second"}
    suite.options, suite.patience = options, patience
    return Soak(suite, minutes, users=2, longest=60)


class Leaking:
    """An engine that keeps something of every call, until it is closed or for ever."""

    def __init__(self, until_it_closes: bool) -> None:
        self.until_it_closes = until_it_closes
        self.kept: list[Future[None]] = []

    @hookimpl
    def genlm_process_logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        self.kept.append(Future())
        return rows

    @hookimpl
    def genlm_call_begins(self, hook: str) -> None:
        if hook == "genlm_close" and self.until_it_closes:
            self.kept.clear()


@pytest.mark.parametrize("continuous", [False, True])
def test_soak_of_the_mock_finds_nothing(continuous):
    one = soak(continuous=continuous)
    assert one.run(), one.findings
    assert one.counts["answers"] > 0


def test_swapped_rows_are_found(capsys):
    mixed_up = Processor(lambda _, rows: rows.flip(0))
    one = soak(minutes=1.0, wrappers=[mixed_up], cache_size=0)
    assert not one.run()
    printed = capsys.readouterr().out
    assert "conformance.compare.Violation: " in printed
    assert "in the program of user 0-0-0-" in printed


def test_an_engine_that_fails_is_found(capsys):
    calls = itertools.count()

    def lost(queries: Any, rows: torch.Tensor) -> torch.Tensor:
        if next(calls) > 20:
            raise RuntimeError("lost")
        return rows

    assert not soak(minutes=1.0, wrappers=[Processor(lost)]).run()
    assert "PluginError" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("until_it_closes", "holder"), [(True, "a model with empty caches"), (False, "closed models")]
)
def test_a_leak_is_found(until_it_closes, holder):
    one = soak(wrappers=[Leaking(until_it_closes)])
    assert not one.run()
    assert any(each.startswith(holder) and "more pending" in each for each in one.findings)


@pytest.mark.parametrize("kind", ["memory", "tensors"])
def test_a_leak_of_bytes_is_found(kind):
    before = usage()
    kept = torch.ones(100 << 20, dtype=torch.uint8)
    grown = usage()
    del kept
    one = soak()
    one.must_not_grow("nothing holds", [grown, usage()])
    assert not one.findings
    one.must_not_grow("it holds", [{kind: before[kind]}, {kind: grown[kind]}])
    assert one.findings == [f"it holds ever more {kind}: {[before[kind], grown[kind]]}"]


@pytest.mark.parametrize(
    ("hook", "calls"), [("genlm_next_token_logprobs", "5"), ("genlm_clear_kv_cache", "1")]
)
def test_a_call_that_hangs_is_shown(hook, calls):
    """This includes a hang of the program itself, after its users have ended."""
    program = STUCK.replace("HOOK", hook).replace("CALLS", calls)
    ended = run_python(program)
    assert ended.returncode == 1
    # A thread that waits for a step reports the hang itself. A thread inside a blocking call
    # cannot.
    assert "genlm_call_begins" in ended.stderr  # the place of the hang


def test_a_run_that_is_stopped_says_what_was_done(capsys):
    one = soak(minutes=1000.0)
    one.stop()
    assert one.run()
    assert "stopped early" in capsys.readouterr().out
