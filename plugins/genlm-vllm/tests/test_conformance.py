"""The suite on a real vLLM: all clauses on a tiny model with adapters; the clauses on state without
adapters, with a real vocabulary, and without live sessions; and the rows of a small real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from genlm.conformance import ConformanceSuite
from genlm.conformance.histories import GrowthClauses, HistoryClauses
from genlm.conformance.state import StateClauses
from genlm.conformance.suite import OneModel
from genlm.core import load_model_by_name
from tests.real_rows import check_rows
from tests.state_suite import StateSuite
from tools.tiny import write_adapter

FLOAT32 = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 256 << 20}
# The lowest rank, because on a CPU vLLM computes as if all adapters had the highest one, in loops
# over tokens.
LORA = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 8, "max_lora_rank": 8}


class OnBytes:
    backend = "vllm"
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _model(cls, bytes_path):
        cls.model = bytes_path


class TestVllm(StateSuite):
    """On a real vocabulary, with padded embeddings."""

    backend = "vllm"
    effort = 0.1
    options = {"engine_opts": FLOAT32}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _model(cls, padded_path):
        cls.model = padded_path


class TestVllmWithoutLiveSessions(OnBytes, HistoryClauses, GrowthClauses, StateClauses, OneModel):
    options = {"engine_opts": FLOAT32, "live_sessions": False}  # noqa: RUF012


@pytest.mark.quick
class TestVllmWithAdapters(OnBytes, ConformanceSuite):
    # Adapters are slow on a CPU; this exceeds several blocks, and TestVllm goes further.
    longest = 129
    options = {"engine_opts": FLOAT32 | LORA}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _adapters(cls, bytes_path, tmp_path_factory):
        folder: Path = tmp_path_factory.mktemp("adapters")
        cls.adapters = {
            name: write_adapter(bytes_path, folder / name, seed) for seed, name in enumerate("ab")
        }


def test_rows_of_a_real_model_equal_those_of_transformers(real_model):
    with load_model_by_name(real_model, "vllm", {"engine_opts": FLOAT32}) as lm:
        check_rows(lm, real_model)
