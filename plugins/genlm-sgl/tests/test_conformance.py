"""What every backend must do, on the real engine: a tiny model, alone and with adapters in mixed
batches; the rows of a small real one."""

from __future__ import annotations

import pytest
from sgl_torch_cpu import without_pinned_memory

from genlm.conformance import ConformanceSuite, RowSuite

LIMITS = {"context_length": 512, "max_total_tokens": 16384}


class TestSgl(ConformanceSuite):
    backend = "sgl"
    options = {"engine_opts": LIMITS}  # noqa: RUF012
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tiny):
        cls.model = tiny


class TestSglReal(RowSuite):
    backend = "sgl"
    options = {"engine_opts": LIMITS}  # noqa: RUF012
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, real_model):
        cls.model = real_model


@pytest.mark.quick
class TestSglLora(ConformanceSuite):
    backend = "sgl"
    effort = 0.1
    options = {"engine_opts": {"enable_lora": True, "max_total_tokens": 8192}}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tiny, make_adapter):
        cls.model = tiny
        cls.adapters = {
            "a": make_adapter(1, "q_proj v_proj"),
            "b": make_adapter(2, "o_proj gate_proj up_proj"),
        }
        with without_pinned_memory():
            yield
