"""What every backend must do, on a real vLLM: with live sessions, without them, and with
adapters."""

from __future__ import annotations

import pytest

from genlm.core.conformance import ConformanceSuite

FLOAT32 = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
# The least rank: on a CPU vLLM computes as if all adapters had the greatest, in loops over tokens.
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 8}


class TestVllm(ConformanceSuite):
    backend = "vllm"
    options = {"engine_opts": FLOAT32}  # noqa: RUF012
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, model_path):
        cls.model = model_path


class TestVllmWithoutLiveSessions(TestVllm):
    effort = 0.1
    options = {"engine_opts": FLOAT32, "live_sessions": False}  # noqa: RUF012


class TestVllmWithAdapters(TestVllm):
    effort = 0.1
    longest = 129  # slow with adapters on a CPU; beyond several blocks, and TestVllm goes further
    options = {"engine_opts": FLOAT32 | LORA}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _given(cls, model_path, write_adapter):
        cls.model = model_path
        cls.adapters = {"a": write_adapter("a", 1), "b": write_adapter("b", 2)}
