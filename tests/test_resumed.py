"""A long run of tests in pieces goes on where it ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import run_python

pytestmark = pytest.mark.any_version

FILE = """
import pathlib

def test_one():
    pass

def test_two():
    assert pathlib.Path("mended").exists()

def test_three():
    pass
"""


@pytest.fixture
def run(tmp_path: Path):
    """Runs the file with these options; gives the exit code, and what the record then says."""
    (tmp_path / "test_it.py").write_text(FILE)
    root = Path(__file__).parents[1]

    def run_pytest(*options: str) -> tuple[int, list[tuple[str, str]]]:
        arguments = [
            "-p",
            "tools.resumed",
            "-p",
            "no:cacheprovider",
            "--record",
            "record",
            *options,
        ]
        done = run_python(f"""
            import os, sys, pytest
            sys.path.insert(0, {str(root)!r})
            os.chdir({str(tmp_path)!r})
            sys.exit(pytest.main({[*arguments, "--rootdir", ".", "test_it.py"]!r}))
        """)
        outcomes = map(json.loads, (tmp_path / "record").read_text().splitlines())
        return done.returncode, [
            (one["test"].removeprefix("test_it.py::test_"), one["outcome"]) for one in outcomes
        ]

    return run_pytest


def test_a_run_continues_behind_the_tests_that_have_ended(run):
    assert run("--seconds", "0") == (2, [("one", "passed")])
    assert run() == (1, [("one", "passed"), ("two", "failed"), ("three", "passed")])


def test_only_a_failed_test_runs_again(run, tmp_path):
    _, before = run()
    (tmp_path / "mended").touch()
    assert run() == (0, [*before, ("two", "passed")])
    assert run() == (0, [*before, ("two", "passed")]), "nothing is left"
