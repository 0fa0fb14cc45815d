"""The suite on the real engine: all clauses on a tiny model with adapters; the clauses on state on
one without adapters, for which SGLang scores itself although its rows are wider than the
vocabulary; and the rows of a small real model."""

from __future__ import annotations

import pytest
from sgl_torch_cpu import without_pinned_memory

from genlm.conformance import ConformanceSuite
from genlm.core import load_model_by_name
from tests.real_rows import check_rows
from tests.state_suite import StateSuite

LIMITS = {"context_length": 512, "max_total_tokens": 16384}


class TestSgl(StateSuite):
    backend = "sgl"
    options = {"engine_opts": LIMITS}  # noqa: RUF012
    effort = 0.1

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tiny):
        cls.model = tiny


@pytest.mark.quick
class TestSglLora(ConformanceSuite):
    backend = "sgl"
    effort = 0.1
    options = {"engine_opts": {"enable_lora": True, "max_total_tokens": 8192}}  # noqa: RUF012

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def given(cls, tiny_without_padding, make_adapter):
        cls.model = tiny_without_padding
        cls.adapters = {
            "a": make_adapter(1, "q_proj v_proj"),
            "b": make_adapter(2, "o_proj gate_proj up_proj"),
        }
        with without_pinned_memory():
            yield


def test_rows_of_a_real_model_equal_those_of_transformers(real_model):
    with load_model_by_name(real_model, "sgl", {"engine_opts": LIMITS}) as lm:
        check_rows(lm, real_model)
