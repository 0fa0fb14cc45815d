"""The programs of this plugin's README run on SGLang."""

from __future__ import annotations

from pathlib import Path

from tests.pages import run_readme


def test_the_blocks_of_the_readme_run(tiny: str) -> None:
    run_readme(Path(__file__).parents[1], tiny)
