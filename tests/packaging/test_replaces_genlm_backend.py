"""pip puts this distribution in the place of genlm-backend 0.3.1, and that back in its place."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ..conformance.kit import ROOT, build

pytestmark = pytest.mark.any_version

COMPAT = ROOT / "compat" / "genlm-backend"
#: The paths at which 0.3.1 and this distribution differ: one has a module and the other a package.
FORMER = {
    "genlm/backend/__init__.py": "from .llm import former",
    "genlm/backend/cache.py": "former = True",
    "genlm/backend/llm/__init__.py": "from ..cache import former",
    "genlm/backend/llm/base.py": "",
}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """This project's wheel, and a wheel with the name and the paths of 0.3.1."""
    folder = tmp_path_factory.mktemp("wheels")
    build(COMPAT, "wheel", folder)
    (ours,) = folder.glob("*.whl")
    former = folder / "genlm_backend-0.3.1-py3-none-any.whl"
    info = "genlm_backend-0.3.1.dist-info"
    files = {
        **FORMER,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: genlm-backend\nVersion: 0.3.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(former, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(
            f"{info}/RECORD", "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
        )
    return {"0.4.0": ours, "0.3.1": former}


class Environment:
    """A virtual environment without pip, which the running one's pip installs into."""

    def __init__(self, folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self._python = folder / ("Scripts" if os.name == "nt" else "bin") / "python"

    def pip(self, *words: object) -> str:
        command = [sys.executable, "-m", "pip", "--python", self._python, *words]
        environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        return subprocess.run(
            list(map(str, command)), env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout

    def install(self, wheel: Path, *options: str) -> None:
        self.pip("install", "--quiet", "--no-index", "--no-deps", *options, wheel)

    def says(self) -> str:
        """The version that `import genlm.backend.llm` finds, or the error that it raises."""
        program = (
            "import genlm.backend.llm as llm; print('0.3.1' if hasattr(llm, 'former') else '0.4.0')"
        )
        # The core, hf and their dependencies are taken from the running Python.
        sources = [
            ROOT / "core" / "src",
            ROOT / "kit" / "src",
            ROOT / "plugins" / "genlm-hf" / "src",
        ]
        path = os.pathsep.join(map(str, [*sources, *filter(None, sys.path)]))
        done = subprocess.run(
            [self._python, "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
        return (done.stdout or done.stderr).strip().splitlines()[-1]


def test_pip_replaces_genlm_backend_and_a_mixture_is_reported(
    tmp_path: Path, wheels: dict[str, Path]
) -> None:
    environment = Environment(tmp_path)
    environment.install(wheels["0.3.1"])
    for version in ("0.4.0", "0.3.1"):
        environment.install(wheels[version])
        assert environment.says() == version
    environment.install(wheels["0.4.0"], "--ignore-installed")
    said = environment.says()
    assert said.startswith("ImportError: genlm-backend 0.3.1 and 0.4.0 are both installed in ")
    assert "pip uninstall genlm-backend" in said
    for _ in wheels:
        environment.pip("uninstall", "--yes", "genlm-backend")
    assert "No module named 'genlm.backend'" in environment.says()


def test_compatibility_package_is_mostly_re_exports() -> None:
    """All behaviour that programs need is in the core or a plugin. Here are only the features of
    0.3 alone: its warnings, its check of a byte decoder, its cache as a mapping, and its drawings
    of tries."""
    lines = [line for file in COMPAT.glob("src/**/*.py") for line in file.read_text().splitlines()]
    assert 0 < len(lines) < 450
