"""Random programs; `costly_fuzz.py` runs them for an hour."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .fuzz import CLOSE, FAR, RECURRENT, fuzz
from .watched import Folders

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

#: Of all together.
SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "8")) / len(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_random_programs(
    folders: Folders,
    lora_folders: dict[str, str],
    family: str,
    fuzz_seed: int,
    say: Callable[[str], None],
) -> None:
    adapters = lora_folders if family == "llama" else {}
    longest, close = FAMILIES[family]
    assert fuzz(folders(family), adapters, fuzz_seed, SECONDS, longest, close, say) > 0
