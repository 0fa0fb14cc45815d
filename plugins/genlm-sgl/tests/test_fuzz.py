"""Random programs with adapters that come and go; `costly_fuzz.py` runs them for an hour."""

from __future__ import annotations

import os

from sgl_torch_cpu import without_pinned_memory

from genlm.conformance import ConformanceSuite
from tools.soak import random_work

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "6"))


def test_adapters_under_load(tiny, make_adapter, fuzz_seed, say) -> None:
    suite = ConformanceSuite()
    suite.backend, suite.model, suite.seed = "sgl", tiny, fuzz_seed
    suite.adapters = {
        "attention": make_adapter(1, "q_proj v_proj"),
        "everything": make_adapter(2, "q_proj v_proj o_proj gate_proj up_proj down_proj"),
        "wide": make_adapter(3, "q_proj k_proj v_proj", rank=32),
        "products": make_adapter(4, "gate_proj up_proj down_proj", rank=8),
    }
    suite.second_model = False  # a process holds one SGLang
    # More adapters than a batch may have, prompts in chunks, a pool that is full at times.
    suite.options = {
        "cache_size": 0,
        "engine_opts": {
            "enable_lora": True,
            "max_loras_per_batch": 2,
            "chunked_prefill_size": 64,
            "max_total_tokens": 2048,
            "max_running_requests": 24,
        },
    }
    with without_pinned_memory():
        say(random_work(suite, SECONDS, longest=200))
