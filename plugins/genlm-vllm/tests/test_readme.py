"""The programs of this plugin's README run on vLLM."""

from __future__ import annotations

from pathlib import Path

from tests.pages import run_readme


def test_the_blocks_of_the_readme_run(small_path: str) -> None:
    run_readme(Path(__file__).parents[1], small_path)
