"""The plugin that the documentation walks through conforms, and what the page shows of it is what
it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .kit import ROOT, CleanEnvironment

pytestmark = pytest.mark.any_version

PLUGIN = ROOT / "examples" / "numpy_plugin"
PAGE = (ROOT / "docs" / "writing-a-plugin.md").read_text()
SNIPPETS = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_of_the_page_is_in_the_plugin(snippet: str) -> None:
    sources = [
        path.read_text() for pattern in ("*.toml", "**/*.py") for path in PLUGIN.glob(pattern)
    ]
    assert any(snippet.rstrip() in source for source in sources)


def test_plugin_conforms_in_a_clean_environment(
    environment: CleanEnvironment, tmp_path: Path
) -> None:
    environment.install(PLUGIN)
    tested = environment.run(
        "python", "-m", "pytest", "-q", "--rootdir", ".", str(PLUGIN / "tests"), cwd=tmp_path
    )
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "error" not in tested.stdout
