"""Random programs with adapters for a minute; `costly_fuzz.py` runs them for an hour.
GENLM_FUZZ_SEED runs one again."""

from __future__ import annotations

import os
import random

import pytest

from .fuzz import fuzz

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "60"))


def test_adapters_under_load(tiny, make_adapter, capsys: pytest.CaptureFixture) -> None:
    folders = {
        "attention": make_adapter(1, "q_proj v_proj"),
        "everything": make_adapter(2, "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        "wide": make_adapter(3, "q_proj k_proj v_proj", rank=32),
        "products": make_adapter(4, "gate_proj up_proj down_proj", rank=8),
    }
    seed = int(os.environ.get("GENLM_FUZZ_SEED", random.SystemRandom().randrange(10**9)))

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    say(f"random programs from seed {seed}")
    assert fuzz(tiny, folders, seed, SECONDS, say) > 0
