"""`genlm conformance` says what came of each clause, and exits accordingly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from genlm.conformance import ConformanceSuite
from genlm.conformance.command import suite_of
from genlm.conformance.compare import ATOL
from genlm.core.cli import main, parser

from .installed import pretend_installed

UNNORMALISED = """
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl

class Engine(mock.MockEngine):
    def row(self, query):
        return super().row(query) + (0.01 if len(query.token_ids) > 1 else 0.0)

@hookimpl
def genlm_load(model, options):
    return Engine(mock.ByteTokenizer(), **options)
"""


@pytest.fixture
def unnormalised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend whose longer contexts have rows with too much mass."""
    pretend_installed(tmp_path, "unnormalised", "genlm_unnormalised", UNNORMALISED)
    monkeypatch.syspath_prepend(tmp_path)
    return "unnormalised"


def run(arguments: str) -> int:
    """The exit code of ``genlm conformance``."""
    return main(["conformance", *arguments.split()])


def test_a_backend_that_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mock --model mock --quick --adapter a=x --adapter b=y") == 0
    *_, verdict = out = capsys.readouterr().out.splitlines()
    assert verdict.startswith("mock conforms")
    for clause in ConformanceSuite.clauses:
        (line,) = [line for line in out if line.split()[:1] == [clause.removeprefix("test_")]]
        assert line.split()[1] in ("passed", "skipped")


def test_a_backend_that_does_not(
    unnormalised: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert run(f"{unnormalised} --model mock --quick --report {page}") == 1
    out = capsys.readouterr().out
    assert out.splitlines()[-1].startswith("unnormalised DOES NOT CONFORM")
    # The counterexample is a short context that is wrong, not a long one.
    failure = out[out.index("\nrow_is_normalised") : out.index("\ncold_row_is_repeatable")]
    assert "FAILED" in failure
    assert "logsumexp(row) is 0.0" in failure
    context = failure[failure.index("context=(") :].partition(")")[0]
    assert context.count(",") < 4
    text = page.read_text()
    assert "DOES NOT CONFORM" in text
    assert "logsumexp(row) is" in text
    assert "http" not in text  # nothing from elsewhere


def test_the_result_as_json(
    unnormalised: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "report.json"
    more = f"--json --option max_context=64 --seed 3 --report {data}"
    assert run(f"{unnormalised} --model mock --quick {more}") == 1
    report = json.loads(capsys.readouterr().out)
    assert json.loads(data.read_text()) == report
    assert report["read_first"] == "row_is_normalised"
    assert report["setting"]["seed"] == "3"
    assert report["setting"]["plugin"] == "genlm-unnormalised 1.0"
    assert all(verdict["deviation"] < 1e-4 for verdict in report["verdicts"])
    assert sum(verdict["rows"] for verdict in report["verdicts"]) > 100
    assert not report["conforms"]
    status = {verdict["clause"]: verdict for verdict in report["verdicts"]}
    assert status["row_is_normalised"]["status"] == "failed"
    assert status["bytes_of_text"]["status"] == "passed"
    assert status["longest_context"]["status"] == "passed"  # by the option
    assert status["rebound_adapter"]["status"] == "skipped"
    assert "adapters" in status["rebound_adapter"]["detail"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nothing-like-it --model mock", "no backend 'nothing-like-it'"),
        ("mock --model mock --adapter x", "--adapter 'x': give --adapter NAME=VALUE"),
        (
            "mock --model mock --dtype float23",
            "--dtype must be one of float32, float16, bfloat16; got 'float23'",
        ),
        (
            "mock --model mock --report report.pdf",
            "--report must end in .html or .json; got 'report.pdf'",
        ),
        (
            "mock --model mock --report no/such/folder/report.html",
            "No such file or directory: 'no/such/folder/report.html'",
        ),
        ("mock --model mock --effort 0", "--effort must be more than 0; got 0"),
        ("mock --model mock --window 0", "--window must be more than 0; got 0"),
        ("mock --model mock --atol nan", "--atol must be more than 0; got nan"),
        ("mock --model mock --reference nobody", "no backend 'nobody'"),
    ],
)
def test_what_cannot_be_run(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_a_model_has_to_be_named() -> None:
    with pytest.raises(SystemExit, match="2"):
        run("mock")


def test_the_exit_code_of_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "genlm.core", "conformance", "mock", "--model", "./nowhere"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 3, ended.stderr
    assert "Traceback" not in ended.stderr


def suite_given(flags: str) -> ConformanceSuite:
    return suite_of(parser().parse_args(f"conformance mock --model m {flags}".split()))


def test_the_dtype_sets_the_tolerance_and_is_no_option() -> None:
    suite = suite_given("--dtype bfloat16 --option steps=2")
    assert suite.atol == ATOL["bfloat16"]
    assert suite.options == {"steps": 2}


def test_what_a_class_says_can_be_said_by_a_flag() -> None:
    flags = "--window 9 --longest 99 --patience 7 --ignores-tokens --text-is-normalised"
    flags += " --no-second-model --reference mock"
    suite = suite_given(flags)
    given = {name: getattr(suite, name) for name in ("window", "longest", "patience", "reference")}
    assert given == {"window": 9, "longest": 99, "patience": 7.0, "reference": "mock"}
    assert suite.ignores_tokens
    assert suite.text_is_normalised
    assert not suite.second_model


FORGETFUL = """
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl
from genlm.core.options import refuse_unknown
from attrs import evolve

class Engine(mock.MockEngine):
    def row(self, query):
        return super().row(evolve(query, token_ids=query.token_ids[-20:]))

@hookimpl
def genlm_load(model, options):
    refuse_unknown("forgetful", options, ("max_context",))
    return Engine(mock.ByteTokenizer(), **options)
"""


@pytest.fixture
def forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend whose model sees the last 20 tokens."""
    pretend_installed(tmp_path, "forgetful", "genlm_forgetful", FORGETFUL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    return "forgetful"


def test_a_model_that_forgets_is_told_of_the_window(
    forgetful: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{forgetful} --model mock --quick --option max_context=64"
    assert run(command) == 1
    out = capsys.readouterr().out
    assert "say so by `window` (--window)" in out
    assert "Read row_depends_on_every_token first" in out
    assert run(f"{command} --window 20") == 0  # of --ignores-tokens see the next test


def test_a_reference_shows_what_is_wrong_in_cold_rows_too(
    forgetful: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{forgetful} --model mock --quick --option max_context=64"
    assert run(f"{command} --ignores-tokens --reference mock") == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert [line.split()[0] for line in failed] == ["cold_rows_are_the_reference"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model mock --option colour=red", "has no option colour"),
        ("--model ./any", "takes the name 'mock'"),
    ],
)
def test_a_model_that_does_not_load_is_said_once_and_at_once(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"mock {arguments}") == 3
    out = capsys.readouterr().out
    assert out.count(message) == 1
    assert out.splitlines()[-1].startswith("mock could not be loaded: ")


def test_a_counterexample_of_long_contexts_is_short(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = UNNORMALISED.replace("> 1", "> 200").replace(
        "+ (0.01", "+ (0.0 if query.cold else 0.01"
    )
    pretend_installed(tmp_path, "long", "genlm_long", source)
    monkeypatch.syspath_prepend(tmp_path)
    assert run("long --model mock --quick") == 1
    out = capsys.readouterr().out
    failure = out[out.index("\nrows_at_every_length") : out.index("\nrow_depends_on_every_token")]
    assert len(failure.splitlines()) < 8
    assert "under test" not in out
    assert "Read " in out
    assert "--adapter NAME=PATH" in out
