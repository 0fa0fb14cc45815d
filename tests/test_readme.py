"""What the README shows is run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tools.entry_points import write_metadata

pytestmark = pytest.mark.any_version

README = (Path(__file__).parent.parent / "README.md").read_text()


def block(before: str, language: str) -> str:
    """The first code block after a text."""
    found = re.search(rf"{re.escape(before)}.*?```{language}\n(.*?)```", README, re.DOTALL)
    assert found, f"the README has no {language} block after {before!r}"
    return found[1]


def test_the_backend_of_the_readme_conforms(tmp_path: Path) -> None:
    project = tomllib.loads(block("Its `pyproject.toml` names the module", "toml"))["project"]
    ((name, module),) = project["entry-points"]["genlm.backends"].items()
    package, file = module.split(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / f"{file}.py").write_text(block(f"file: {package}/{file}.py", "python"))
    write_metadata(tmp_path, project["name"], project["version"], project["entry-points"])
    command = "import sys; from genlm.core.cli import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", command, "conformance", name, "--model", "any", "--quick"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{name} conforms" in done.stdout
