"""The programs of examples/, as modules."""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from genlm.core import AsyncLM, load_model_by_name

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def example() -> Iterator[Callable[[str], ModuleType]]:
    """Imports an example by name."""

    def load(name: str) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    sys.path.append(str(FOLDER))  # an example may import another
    yield load
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def lm() -> Iterator[AsyncLM]:
    """The mock."""
    with load_model_by_name("mock", backend="mock") as lm:
        yield lm


@pytest.fixture
def run_on_the_mock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs an example with arguments, and returns its output."""

    def run(name: str, *arguments: str) -> str:
        program = str(FOLDER / f"{name}.py")
        monkeypatch.setattr(sys, "argv", [program, *arguments, "--backend", "mock"])
        runpy.run_path(program, run_name="__main__")
        printed = capsys.readouterr()
        assert printed.err == ""
        return printed.out

    return run
