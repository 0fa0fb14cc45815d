"""Random programs on two models, each closed in the middle of its work; `costly_fuzz.py` runs them
for an hour."""

from __future__ import annotations

import os
from collections.abc import Callable

from genlm.conformance import ConformanceSuite
from tools.soak import random_work

SECONDS = float(os.environ.get("GENLM_FUZZ_SECONDS", "5"))


def test_two_models_one_of_which_is_closed(
    tiny_path: str, fuzz_seed: int, say: Callable[[str], None]
) -> None:
    suite = ConformanceSuite()
    suite.backend, suite.model, suite.seed = "vllm", tiny_path, fuzz_seed
    # Prompts in chunks, contexts of several blocks, a cache of about a thousand tokens.
    suite.options = {
        "cache_size": 0,
        "engine_opts": {
            "dtype": "float32",
            "max_model_len": 256,
            "max_num_seqs": 16,
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 1 << 20,
        },
    }
    say(random_work(suite, SECONDS, longest=200))
