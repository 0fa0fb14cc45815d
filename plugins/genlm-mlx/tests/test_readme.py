"""The programs of this plugin's README run on MLX."""

from __future__ import annotations

from pathlib import Path

from tests.pages import run_readme

from .watched import Folders


def test_the_blocks_of_the_readme_run(folders: Folders) -> None:
    run_readme(Path(__file__).parents[1], str(folders("llama")))
