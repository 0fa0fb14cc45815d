"""The contents of built distributions, which share the ``genlm`` namespace with other
distributions."""

from __future__ import annotations

import subprocess
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest

from ..conformance.kit import ROOT, build

pytestmark = pytest.mark.any_version

DISTRIBUTIONS = [
    ROOT / "core",
    ROOT / "kit",
    ROOT / "conformance",
    *sorted(project.parent for project in ROOT.glob("plugins/*/pyproject.toml")),
    *sorted(project.parent for project in ROOT.glob("compat/*/pyproject.toml")),
]
#: The former package of a distribution, besides its package in the namespace.
FORMER = {"genlm-backend": {"genlm_backend"}}


@pytest.fixture(scope="module", params=DISTRIBUTIONS, ids=lambda folder: folder.name)
def distribution(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture(scope="module")
def wheel(distribution: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a distribution, built from its source archive as for PyPI."""
    built = tmp_path_factory.mktemp(distribution.name)
    build(distribution, "sdist", built)
    (archive,) = built.glob("*.tar.gz")
    subprocess.run(["tar", "-xzf", archive, "-C", built], check=True)
    build(built / archive.name.removesuffix(".tar.gz"), "wheel", built)
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


def test_no_wheel_owns_the_namespace(wheel: zipfile.ZipFile) -> None:
    assert "genlm/__init__.py" not in wheel.namelist()


def test_modules_lie_in_one_package_of_the_namespace(wheel: zipfile.ZipFile) -> None:
    packages = {name.split("/")[1] for name in wheel.namelist() if name.startswith("genlm/")}
    assert len(packages) == 1
    assert f"genlm/{packages.pop()}/__init__.py" in wheel.namelist()


def test_types_are_shipped(wheel: zipfile.ZipFile) -> None:
    (marker,) = (
        name for name in wheel.namelist() if name.startswith("genlm/") and name.endswith("py.typed")
    )
    assert marker.count("/") == 2


def test_nothing_else_is_shipped(wheel: zipfile.ZipFile, distribution: Path) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    allowed = {"genlm"} | FORMER.get(distribution.name, set())
    assert {top for top in tops if not top.endswith(".dist-info")} == allowed
    assert not [name for name in wheel.namelist() if "tests/" in name or name.endswith(".pyc")]


def test_the_backend_is_found_by_an_entry_point_to_a_shipped_module(
    wheel: zipfile.ZipFile, distribution: Path
) -> None:
    if distribution.parent.name == "compat" or distribution.name in ("kit", "conformance"):
        assert "genlm.backends" not in read_entry_points(wheel)  # the wheel provides no backend
        return
    entry_points = read_entry_points(wheel)
    assert entry_points["genlm.backends"]
    for module in entry_points["genlm.backends"].values():
        path = module.replace(".", "/")
        assert {f"{path}.py", f"{path}/__init__.py"} & set(wheel.namelist())


def test_the_command_belongs_to_the_core(wheel: zipfile.ZipFile, distribution: Path) -> None:
    scripts = read_entry_points(wheel).get("console_scripts", {})
    assert list(scripts) == (["genlm"] if distribution.name == "core" else [])


def read_entry_points(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    parser = ConfigParser(delimiters=("=",))
    for path in wheel.namelist():
        if path.endswith(".dist-info/entry_points.txt"):
            parser.read_string(wheel.read(path).decode())
    return {section: dict(parser[section]) for section in parser.sections()}
