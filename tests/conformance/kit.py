"""A clean environment with wheels in it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[2]


def build(source: Path, target: str, to: Path) -> None:
    """Build the wheel or the source archive of a project."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(to)]
    subprocess.run(command, cwd=source, check=True)


class CleanEnvironment:
    """A virtual environment that holds what is installed into it, before what the running one has.

    PyTorch is too large to install for a test, so the running environment's packages can be seen
    from this one; those that it has as editable projects cannot.
    """

    def __init__(self, folder: Path) -> None:
        self._wheels = folder / "wheels"
        self._python = folder / "env" / "bin" / "python"
        venv.create(folder / "env", with_pip=False, symlinks=True)
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        (site / "running.pth").write_text(sysconfig.get_path("purelib"))

    def install(self, *projects: Path) -> None:
        """Build the wheels of projects and install them, as pip does."""
        wheels: list[str] = []
        for project in projects:
            built = self._wheels / project.name
            build(project, "wheel", built)
            wheels += map(str, built.glob("*.whl"))
        how = ["install", "--no-deps", "--no-index", "--quiet", "--force-reinstall"]
        pip = [sys.executable, "-m", "pip", "--python", str(self._python), *how, *wheels]
        subprocess.run(pip, check=True)

    def run(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run one of the environment's commands."""
        command = [str(self._python.with_name(arguments[0])), *arguments[1:]]
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        return subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
