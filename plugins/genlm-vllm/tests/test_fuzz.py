"""Random programs; `costly_fuzz.py` runs them for an hour."""

from __future__ import annotations

import os
from collections.abc import Callable

from .fuzz import fuzz

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "15"))


def test_two_models_one_of_which_is_closed(
    tiny_path: str, fuzz_seed: int, say: Callable[[str], None]
) -> None:
    assert fuzz(tiny_path, fuzz_seed, SECONDS, say) > 0
