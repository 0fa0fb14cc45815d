"""The suite never hangs: an engine that stops answering is a failure that says what was asked, and
what was found before is told."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from genlm.conformance import ConformanceSuite, model
from genlm.conformance.compare import Violation
from genlm.conformance.report import run
from genlm.core import hookimpl
from genlm.core.cli import main
from genlm.core.mock import ContinuousMockEngine, MockEngine

from .faulty import OfTheMock

pytestmark = pytest.mark.any_version

#: Set at the end, to release the threads that the tests hold.
END = threading.Event()


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    END.clear()
    yield
    END.set()


class WithFiles(MockEngine):
    """The mock, which reads the files of adapters."""

    @hookimpl
    def genlm_read_lora(self, adapter):
        return None


#: The hooks that stop, after how many calls, engines that have them, and a clause that calls them.
STOPPING = {
    "genlm_next_token_logprobs": (2, MockEngine, "batch_answers_in_order"),
    "genlm_sample": (0, MockEngine, "draws_at_every_length"),
    "genlm_sequence_logprobs": (0, MockEngine, "scores_together"),
    "genlm_cache_prefix": (0, MockEngine, "pinned_prefix"),
    "genlm_clear_kv_cache": (0, MockEngine, "dropped_state"),
    "genlm_read_lora": (0, WithFiles, "adapter_changes_the_rows"),
    "genlm_add_lora": (0, MockEngine, "adapter_changes_the_rows"),
    "genlm_remove_lora": (0, MockEngine, "removed_adapter"),
    "genlm_close": (0, MockEngine, "close_fails_what_is_pending"),
    "genlm_step": (30, ContinuousMockEngine, ""),
    "genlm_wake": (0, ContinuousMockEngine, "wake_in_the_middle_of_a_step"),
}


class Stopping(OfTheMock):
    """The suite on an engine that does not return from a hook."""

    patience = 2.0


def stopping(engine: type[MockEngine], hook: str) -> type[MockEngine]:
    """The engine, with a hook that does not return after some calls."""
    calls = itertools.count()
    sound = getattr(engine, hook)
    taken = ", ".join(inspect.signature(sound).parameters)

    def call(*given: Any) -> Any:
        if next(calls) >= STOPPING[hook][0]:
            END.wait()
        return sound(*given)

    made: dict[str, Any] = {"call": call, "hookimpl": hookimpl}
    source = f"@hookimpl\ndef {hook}({taken}): return call({taken})"
    exec(compile(source, __file__, "exec"), made)
    return type("Stops", (engine,), {hook: made[hook]})


@pytest.mark.parametrize("hook", STOPPING)
def test_hanging_engine_fails_and_the_hook_is_named(hook: str) -> None:
    _, engine, clause = STOPPING[hook]
    suite = Stopping(stopping(engine, hook), effort=0.05)
    report = run(suite, only=lambda name: clause in name)
    END.set()
    # On a busy machine other clauses may lose patience, too.
    told = report.not_loaded or " ".join(verdict.detail for verdict in report.failed)
    assert "it hangs" in told
    assert "(in the engine's own code now, in " in told
    assert f"in {hook}: {__file__}, line " in told  # Threads of other tests may hang, too.


def test_hanging_load_ends_the_run() -> None:
    def load(*arguments: object, **options: object) -> MockEngine:
        END.wait()
        raise RuntimeError("too late")

    suite = OfTheMock(load, effort=0.05)
    suite.patience = 0.05
    report = run(suite)
    assert not report.conforms
    assert "it hangs" in str(report.not_loaded)


STUCK = """
import ctypes, threading, torch
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl

class Engine(mock.ContinuousMockEngine):
    @hookimpl
    def genlm_wake(self):
        {stuck}

@hookimpl
def genlm_load(model, options):
    return Engine(mock.ByteTokenizer(), delay=0.01)
"""


ENDLESS = """
import threading
from genlm.core.mock import genlm_backend_info, genlm_load

threading.Event().wait()
"""


def test_hanging_import_ends_the_run(install, monkeypatch, capsys) -> None:
    """The command says so, and so does a test that inherits the suite."""
    install("endless", ENDLESS)
    # A busy machine may take more than a second to find the module that then hangs.
    monkeypatch.setattr(model, "IMPORT_SECONDS", 4.0)
    found = "importing the plugin module of 'endless' did not return within 4 s: it hangs"
    where = r"in the import of its module: \S+plugin_endless\.py, line 5, in <module>\)$"
    assert main(["conformance", "endless", "--model", "any", "--patience", "0.5"]) == 3
    (told,) = capsys.readouterr().out.splitlines()[1:]
    assert told.startswith(f"endless could not be loaded: {found}")
    assert re.search(where, told)
    suite = ConformanceSuite()
    suite.backend, suite.model, suite.patience = "endless", "any", 0.5
    with contextlib.closing(suite.subject()) as live, pytest.raises(Violation, match=found):
        live.lm  # noqa: B018


#: The command, where all that takes long to import is there before the time of the run begins.
COMMAND = """
import sys
import genlm.core.mock, torch
from genlm.core.cli import main

sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("stuck", "deadline", "said"),
    [
        ("threading.Event().wait()", 100, "stuck DOES NOT CONFORM"),
        ("ctypes.PyDLL(None).sleep(10000)", 15, "Timeout"),
    ],
    ids=["waits", "locks"],
)
def test_hanging_hook_ends_the_command(stuck: str, deadline: int, said: str, install) -> None:
    """Also where a hook that any thread may call never returns, or holds the interpreter's lock:
    what was found before is told, and the process ends."""
    install("stuck", STUCK.format(stuck=stuck))
    command = [sys.executable, "-c", COMMAND, "conformance", "stuck", "--model", "mock"]
    done = subprocess.run(
        [*command, "--quick", "--patience", "2", "--deadline", str(deadline)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 1, told
    assert re.search("bytes_of_text +passed", told), told
    assert "in genlm_wake" in told, told
    assert said in told, told


class Slow(MockEngine):
    """Answers everything, and would go on for hours."""

    @hookimpl
    def genlm_next_token_logprobs(self, queries):
        END.wait(0.2)
        return super().genlm_next_token_logprobs(queries)


def test_run_beyond_its_deadline_ends() -> None:
    """Earlier results are reported, the clause under way fails, and the others are not tried."""
    suite = OfTheMock(Slow, effort=1.0)
    suite.longest = 64
    suite.deadline = 4.0
    report = run(suite)
    assert not report.conforms
    (late,) = report.failed
    assert "the time of the whole run was over, and " in late.detail
    assert "`effort` (--quick)" in late.detail
    passed = [verdict.clause for verdict in report.verdicts if verdict.status == "passed"]
    assert passed
    assert report.skipped[-1].detail.startswith("given up: the time of the whole run was over")
