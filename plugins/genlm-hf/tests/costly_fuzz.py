"""An hour of random work, see ``fuzz.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from .fuzz import ATTENTION, RECURRENT, fuzz


@pytest.mark.parametrize("families", [RECURRENT, ATTENTION], ids=["recurrent", "attention"])
def test_random_work_for_long(families: Sequence[str], say: Callable[[str], None]) -> None:
    fuzz(families, seconds=1800, say=say)
