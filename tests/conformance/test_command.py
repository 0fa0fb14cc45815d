"""`genlm conformance` says what came of each clause, and exits accordingly."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from genlm.conformance import ConformanceSuite, command
from genlm.conformance.command import suite_of
from genlm.conformance.compare import ATOL
from genlm.conformance.report import Verdict
from genlm.conformance.report import run as run_suite
from genlm.core.cli import main, parser

from .faulty import verdict_on

pytestmark = pytest.mark.any_version

PLUGIN = """
from genlm.core import mock
from genlm.core.mock import genlm_backend_info, hookimpl
from genlm.core.options import refuse_unknown
from attrs import evolve

class Engine(mock.MockEngine):
    def row(self, query):
        ids, row = query.token_ids, super().row(query)
        return {row}

@hookimpl
def genlm_load(model, options):
    refuse_unknown("faulty", options, ("max_context",))
    return Engine(mock.ByteTokenizer(), **options)
"""

#: Backends by name: the rows that they give.
FAULTY = {
    "heavy": "row + (0.01 if len(ids) > 1 else 0.0)",
    "long": "row + (0.01 if len(ids) > 200 and not query.cold else 0.0)",
    "forgetful": "super().row(evolve(query, token_ids=ids[-20:]))",
}


@pytest.fixture
def faulty(install: Callable[..., None]) -> None:
    for name, row in FAULTY.items():
        install(name, PLUGIN.replace("{row}", row))


#: Some clauses, each with its outcome on a heavy backend.
CLAUSES = {
    "bytes_of_text": "passed",
    "row_is_normalised": "failed",
    "longest_context": "passed",  # The option makes max_context small enough.
    "rebound_adapter": "skipped",
}


@pytest.fixture
def few_clauses(monkeypatch: pytest.MonkeyPatch) -> None:
    few = functools.partial(run_suite, only=lambda clause: clause in CLAUSES)
    monkeypatch.setattr(command, "run", few)


def run(arguments: str) -> int:
    """The exit code of ``genlm conformance``."""
    return main(["conformance", *arguments.split()])


def suite_given(flags: str) -> ConformanceSuite:
    return suite_of(parser().parse_args(f"conformance {flags}".split()))


def verdict_of(flags: str, clause: str) -> Verdict:
    return verdict_on(suite_given(f"{flags} --quick"), clause)


@pytest.mark.usefixtures("few_clauses")
def test_sound_backend_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    adapters = "--adapter a=x --adapter b=y"
    assert run(f"mock --model mock --quick --option max_context=64 {adapters}") == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert verdict.startswith("mock conforms: 4 clauses, 4 passed, 0 skipped, 0 failed")
    assert {line.split()[0] for line in lines if " passed " in line} == {*CLAUSES}


@pytest.mark.usefixtures("faulty", "few_clauses")
def test_faulty_backend_does_not_conform(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    assert run(f"heavy --model mock --quick --option max_context=64 --report {page}") == 1
    out = capsys.readouterr().out
    told = re.findall(r"^(\w+) +(passed|skipped|FAILED)\b", out, flags=re.MULTILINE)
    assert {clause: status.lower() for clause, status in told} == CLAUSES
    assert out.splitlines()[-1].startswith("heavy DOES NOT CONFORM")
    assert "Read row_is_normalised first" in out
    assert "--adapter NAME=PATH" in out
    # The counterexample is a short context that is wrong, not a long one.
    failure = out[out.index("\nrow_is_normalised") : out.index("\nlongest_context")]
    assert "logsumexp(row) is 0.0" in failure
    context = failure[failure.index("context=(") :].partition(")")[0]
    assert context.count(",") < 4
    text = page.read_text()
    assert "DOES NOT CONFORM" in text
    assert "logsumexp(row) is" in text
    assert "http" not in text  # The page must load nothing from the network.


@pytest.mark.usefixtures("faulty", "few_clauses")
def test_json_flag_prints_the_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "report.json"
    more = f"--json --option max_context=64 --seed 3 --report {data}"
    assert run(f"heavy --model mock --quick {more}") == 1
    report = json.loads(capsys.readouterr().out)
    assert json.loads(data.read_text()) == report
    assert report["read_first"] == "row_is_normalised"
    assert report["setting"]["seed"] == "3"
    assert report["setting"]["plugin"] == "heavy 1.2"
    assert not report["conforms"]
    assert all(verdict["deviation"] < 1e-4 for verdict in report["verdicts"])
    assert sum(verdict["rows"] for verdict in report["verdicts"]) > 10
    assert {verdict["clause"]: verdict["status"] for verdict in report["verdicts"]} == CLAUSES
    (skipped,) = [one for one in report["verdicts"] if one["status"] == "skipped"]
    assert "adapters" in skipped["detail"]


@pytest.mark.usefixtures("faulty")
def test_counterexample_of_long_contexts_is_short() -> None:
    detail = verdict_of("long --model mock", "rows_at_every_length").detail
    assert 0 < len(detail.splitlines()) < 10
    assert "under test" not in detail
    assert re.search(r"\n  wrong at lengths \[255, .*\]; right at \[1, 2, .*, 129\]\n", detail)


@pytest.mark.usefixtures("faulty")
def test_failure_of_a_windowed_model_names_the_flag() -> None:
    forgetful = "forgetful --model mock --option max_context=64"
    clause = "row_depends_on_every_token"
    assert "say so by `window` (--window)" in verdict_of(forgetful, clause).detail
    assert verdict_of(f"{forgetful} --window 20", clause).status == "passed"
    assert verdict_of(f"{forgetful} --ignores-tokens", clause).status == "skipped"


@pytest.mark.usefixtures("faulty")
def test_reference_backend_reveals_wrong_cold_rows() -> None:
    forgetful = "forgetful --model mock --option max_context=64"
    clause = "cold_rows_are_the_reference"
    assert verdict_of(forgetful, clause).status == "skipped"
    assert verdict_of(f"{forgetful} --reference mock", clause).status == "failed"
    assert verdict_of("mock --model mock --reference mock", clause).status == "passed"


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
        ("mock --model mock --atol nan", "--atol must be more than 0; got nan"),
        ("mock --model mock --reference nobody", "no backend 'nobody'"),
    ],
)
def test_wrong_argument_exits_with_two(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    assert message in capsys.readouterr().err


def test_missing_model_exits_with_two() -> None:
    with pytest.raises(SystemExit, match="2"):
        run("mock")


def test_dtype_flag_sets_only_the_tolerance() -> None:
    suite = suite_given("mock --model m --dtype bfloat16 --option steps=2")
    assert suite.atol == ATOL["bfloat16"]
    assert suite.options == {"steps": 2}


def test_flags_set_the_suites_attributes() -> None:
    suite = suite_given(
        "mock --model m --longest 99 --patience 7 --deadline 5 --text-is-normalised "
        "--no-second-model --adapter a=x"
    )
    assert (suite.longest, suite.patience, suite.deadline) == (99, 7.0, 5.0)
    assert suite.adapters == {"a": "x"}
    assert suite.text_is_normalised
    assert not suite.second_model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model mock --option colour=red", "has no option colour"),
        ("--model ./any", "takes the name 'mock'"),
    ],
)
def test_unloadable_model_ends_the_run_at_once(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"mock {arguments}") == 3
    out = capsys.readouterr().out
    assert out.count(message) == 1
    assert out.splitlines()[-1].startswith("mock could not be loaded: ")
    assert run(f"mock {arguments} --json") == 3
    assert message in json.loads(capsys.readouterr().out)["not_loaded"]
