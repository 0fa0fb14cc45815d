"""A minute of random work, with another seed each time; ``costly_fuzz.py`` takes an hour."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("peft", reason="adapters are made with the package peft")

from .fuzz import ATTENTION, RECURRENT, fuzz


@pytest.mark.parametrize("families", [RECURRENT, ATTENTION], ids=["recurrent", "attention"])
def test_random_work(families: Sequence[str], say: Callable[[str], None]) -> None:
    fuzz(families, seconds=30, say=say)
