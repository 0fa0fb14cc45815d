"""What a stranger's model folder may do: none of its code runs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from genlm.conformance.trust import TrustSuite
from genlm.core import InvalidOptionError

SMALL = {"max_model_len": 64, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}


class TestTrust(TrustSuite):
    backend = "vllm"
    options: ClassVar = {"engine_opts": {**SMALL, "enable_lora": True}}

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tiny_path) -> str:
        return str(tiny_path)


def test_a_misspelt_option_names_the_right_one():
    from genlm.vllm import AsyncVirtualLM

    with pytest.raises(
        InvalidOptionError,
        match=r"no option live_session \(did you mean live_sessions\?\); it has engine_opts, live",
    ):
        AsyncVirtualLM.from_name("any", live_session=3)
