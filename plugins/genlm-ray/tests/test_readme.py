"""What this plugin's README shows runs on replicas of hf, and ends a fleet."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genlm.core import AsyncLM, EngineDeadError
from tests.pages import run_readme


def test_the_blocks_of_the_readme_run(fleet: Callable[..., AsyncLM], tiny: str) -> None:
    big = fleet(name="big", replicas=1)
    # This process is in a cluster already, which is at no such address.
    run_readme(Path(__file__).parents[1], tiny, left_out=', address="10.0.0.1:6379"')
    with pytest.raises(EngineDeadError, match="the fleet has been ended"):
        big.next_token_logprobs_sync([1])
