"""Random work; ``costly_fuzz.py`` takes an hour. To repeat what was found:
``GENLM_FUZZ_SEED=... nox -R -s "plugin(hf)" -- -k fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import pytest

pytest.importorskip("peft", reason="adapters are made with the package peft")

from .fuzz import ATTENTION, RECURRENT, fuzz

pytestmark = pytest.mark.any_version

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "16")) / 2


@pytest.mark.parametrize("families", [RECURRENT, ATTENTION], ids=["recurrent", "attention"])
def test_random_work(families: Sequence[str], fuzz_seed: int, say: Callable[[str], None]) -> None:
    fuzz(families, fuzz_seed, SECONDS, say)
