"""Random programs with adapters; `costly_fuzz.py` runs them for an hour."""

from __future__ import annotations

import os

from .fuzz import fuzz

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "15"))


def test_adapters_under_load(tiny, make_adapter, fuzz_seed, say) -> None:
    folders = {
        "attention": make_adapter(1, "q_proj v_proj"),
        "everything": make_adapter(2, "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        "wide": make_adapter(3, "q_proj k_proj v_proj", rank=32),
        "products": make_adapter(4, "gate_proj up_proj down_proj", rank=8),
    }
    assert fuzz(tiny, folders, fuzz_seed, SECONDS, say) > 0
