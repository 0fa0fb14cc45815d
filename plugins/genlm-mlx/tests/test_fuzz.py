"""Random programs, for a few seconds each; `costly_fuzz.py` runs them for an hour."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from .fuzz import CLOSE, FAR, RECURRENT, fuzz

#: The ways of keeping state, and the longest contexts.
FAMILIES = {
    "llama": (3000, FAR),
    "gpt2": (250, CLOSE),
    "qwen2": (3000, FAR),
    "gemma3": (600, CLOSE),
    "gemma2": (600, CLOSE),
    "mamba": (300, RECURRENT),
    "lfm2": (600, CLOSE),
    "falcon_h1": (300, RECURRENT),
}

#: In the gate, a minute of all together.
SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "60")) / len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(
    folders: Callable[[str], Path],
    lora_folders: dict[str, str],
    family: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GENLM_FUZZ_SEED runs one again; the seed of a failure is printed."""
    seed = int(os.environ.get("GENLM_FUZZ_SEED", random.SystemRandom().randrange(10**9)))
    adapters = lora_folders if family == "llama" else {}
    longest, close = FAMILIES[family]

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}")

    say(f"{family}: random programs from seed {seed}")
    assert fuzz(folders(family), adapters, seed, SECONDS, longest, close, say) > 0
