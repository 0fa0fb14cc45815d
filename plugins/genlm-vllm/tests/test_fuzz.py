"""Random programs for a minute; `costly_fuzz.py` runs them for an hour. GENLM_FUZZ_SEED runs one
again."""

from __future__ import annotations

import os
import random

import pytest

from .fuzz import fuzz

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "60"))


def test_two_models_one_of_which_is_closed(tiny_path: str, capsys: pytest.CaptureFixture) -> None:
    seed = int(os.environ.get("GENLM_FUZZ_SEED", random.SystemRandom().randrange(10**9)))

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    say(f"random programs from seed {seed}")
    assert fuzz(tiny_path, seed, SECONDS, say) > 0
