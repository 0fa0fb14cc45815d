"""The programs of this plugin's README run on replicas of hf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.pages import run_readme


def test_the_blocks_of_the_readme_run(cluster: Any, tiny: str) -> None:
    # This process is already in a cluster, which has another address.
    run_readme(Path(__file__).parents[1], tiny, left_out=', address="10.0.0.1:6379"')
