"""No code of an untrusted model folder runs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from genlm.conformance.trust import TrustSuite

from .driven import rarely_collected

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}


class TestTrust(TrustSuite):
    backend = "vllm"
    options: ClassVar = {"engine_opts": {**SMALL, "enable_lora": True}}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, small_path) -> str:
        return str(small_path)

    @pytest.fixture(autouse=True)
    def _rarely_collected(self):
        with rarely_collected():
            yield
