"""A plugin that `genlm new-plugin` writes is complete: built, installed beside the core's wheel, it
conforms."""

from __future__ import annotations

import contextlib
import importlib
import re
import shlex
from pathlib import Path

import pytest

from genlm.conformance import ConformanceSuite
from genlm.conformance.scaffold import write_plugin
from genlm.core import AsyncLM, InvalidOptionError
from genlm.core.cli import main

from .kit import ROOT, CleanEnvironment

pytestmark = pytest.mark.any_version


def test_new_plugin_conforms(environment: CleanEnvironment, tmp_path: Path) -> None:
    written = environment.run("genlm", "new-plugin", "my-toy", cwd=tmp_path)
    assert written.returncode == 0, written.stderr
    plugin = tmp_path / "genlm-my-toy"
    environment.install(plugin)

    checked = environment.run(
        "genlm", "conformance", "my-toy", "--model", "my-toy", "--quick", cwd=tmp_path
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.startswith("my-toy (genlm-my-toy 0.1.0) on my-toy\n")
    assert "my-toy conforms" in checked.stdout
    program = (
        "import genlm.core; print(genlm.core.__file__); "
        "from genlm_my_toy import AsyncMyToyLM; print(AsyncMyToyLM.from_name('small'))"
    )
    made = environment.run("python", "-c", program, cwd=tmp_path)
    assert "<AsyncMyToyLM model='small', backend='my-toy'" in made.stdout, made.stderr
    assert str(ROOT / "core" / "src") not in made.stdout

    tested = environment.run(
        "python", "-m", "pytest", "-q", "-k", "normalised or missing", str(plugin), cwd=tmp_path
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.parametrize("name", ["mine", "foo", "a", "x1", "my-model", "llama", "b-2-c", "q"])
def test_new_plugin_of_any_name_depends_on_every_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights of the toy network are made from the name: none of them forgets a token."""
    plugin = write_plugin(name, tmp_path / "plugin")
    monkeypatch.syspath_prepend(plugin / "src")
    module = importlib.import_module(f"genlm_{name.replace('-', '_')}.engine")
    (engine,) = [
        made for made in vars(module).values() if getattr(made, "__module__", "") == module.__name__
    ]
    suite = ConformanceSuite()
    suite.backend = suite.model = name
    suite.load = lambda **core: AsyncLM(lambda: engine(name), backend=name, **core)  # type: ignore[method-assign]
    with contextlib.closing(suite.subject()) as live:
        suite.test_row_depends_on_every_token(live)
        suite.test_row_is_normalised(live)


def test_folder_that_is_not_empty_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(InvalidOptionError, match="not empty"):
        write_plugin("toy", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["", "Toy", "to y", "-toy", "toy-", "toy_2", "2toy"])
def test_invalid_backend_name_is_rejected(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidOptionError, match="cannot be a backend's name"):
        write_plugin(name, tmp_path)


@pytest.mark.parametrize("name", ["core", "kit", "bytes", "backend", "control", "hf", "vllm"])
def test_name_of_an_existing_distribution_is_rejected(name: str, tmp_path: Path) -> None:
    for given in (name, f"genlm-{name}"):  # Both mean the same backend.
        with pytest.raises(
            InvalidOptionError, match=f"distribution genlm-{name} exists already; choose another"
        ):
            write_plugin(given, tmp_path)


def test_printed_command_is_quoted_for_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "it's mine")
    assert main(["new-plugin", "toy", "--folder", folder]) == 0
    words = shlex.split(capsys.readouterr().out.partition("; now: ")[2])
    assert words == ["pip", "install", "-e", f"{folder}[test]", "&&", "pytest", folder]


@pytest.mark.parametrize(("name", "said"), [("mock", ".* installed already"), ("toy", r"\[Errno")])
def test_installed_name_or_file_as_folder_is_rejected(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    assert main(["new-plugin", name, "--folder", str(tmp_path / "file")]) == 1
    assert re.match(f"genlm: {said}", capsys.readouterr().err)
