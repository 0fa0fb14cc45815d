"""Messages name a command that can install the missing distribution; in a clone, from the clone's
folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from genlm.core import BackendNotFoundError, load_model_by_name
from genlm.core.cli import main
from genlm.core.installation import pip_install
from tools.entry_points import write_metadata


@pytest.fixture
def installed_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretends that pip installed the core from there."""

    def pretend(url: str | None) -> None:
        info = write_metadata(tmp_path / "site", "genlm-core", "0.1.0", {})
        if url is not None:
            (info / "direct_url.json").write_text(json.dumps({"url": url, "dir_info": {}}))
        monkeypatch.syspath_prepend(str(info.parent))

    return pretend


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    for folder in ("core", "kit", "conformance", "plugins/genlm-vllm"):
        (tmp_path / "a clone" / folder).mkdir(parents=True)
        (tmp_path / "a clone" / folder / "pyproject.toml").touch()
    return tmp_path / "a clone"


def test_from_a_clone_its_folders_are_installed(installed_from, clone):
    installed_from((clone / "core").as_uri())
    both = f"'{clone / 'kit'}' '{clone / 'plugins' / 'genlm-vllm'}'"
    assert pip_install("genlm-vllm") == f"pip install {both}"
    assert pip_install("genlm-core", "completion") == f"pip install '{clone / 'core'}[completion]'"
    assert pip_install("genlm-conformance") == f"pip install '{clone / 'conformance'}'"
    assert pip_install("genlm-mlx") == "pip install genlm-mlx"  # this clone has no folder for it


@pytest.mark.parametrize("url", [None, "https://example.org/genlm_core-0.1.0.whl", "file:///gone"])
def test_outside_a_clone_packages_come_from_pypi(installed_from, url):
    installed_from(url)
    assert pip_install("genlm-vllm") == "pip install genlm-vllm"
    assert pip_install("genlm-core", "completion") == "pip install 'genlm-core[completion]'"


def test_messages_name_the_install_command(installed_from, clone, capsys, monkeypatch):
    installed_from((clone / "core").as_uri())
    monkeypatch.setattr("genlm.core.plugins.backend_names", lambda: ["mock"])
    with pytest.raises(BackendNotFoundError, match=r"pip install '.*a clone.*genlm-vllm'"):
        load_model_by_name("any", "vllm")
    assert main(["backends"]) == 0
    assert f"not installed: {pip_install('genlm-vllm')}" in capsys.readouterr().out
    monkeypatch.setattr("genlm.core.cli.entry_points", lambda group: [])
    assert main(["conformance", "mock", "--model", "mock"]) == 1
    assert pip_install("genlm-conformance") in capsys.readouterr().err
