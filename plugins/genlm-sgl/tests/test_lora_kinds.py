"""Every kind of adapter that PEFT saves is applied correctly or rejected, as ``docs/adapters.md``
says."""

from __future__ import annotations

import pytest
from sgl_torch_cpu import without_pinned_memory

from genlm.sgl import AsyncSGLTransformer
from tests.adapter_kinds import KINDS
from tests.adapter_outcomes import make_case, outcome
from tests.adapter_table import check_refused, strangers, tabled


@pytest.fixture(scope="module")
def cases(tiny, tmp_path_factory):
    """Made first: with the model below, transformers loads none."""
    return {kind.name: make_case(kind, tiny, tmp_path_factory.mktemp("case")) for kind in KINDS}


@pytest.fixture(scope="module")
def others(tiny, tmp_path_factory):
    return strangers(tiny, tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def lm(tiny, cases, others):
    options = {"enable_lora": True, "max_loras_per_batch": 3, "max_total_tokens": 4096}
    with (
        without_pinned_memory(),
        AsyncSGLTransformer.from_name(tiny, engine_opts=options, cache_size=0) as model,
    ):
        yield model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_lora_kind_has_the_outcome_of_the_table(lm, cases, kind):
    found = outcome(lm, cases[kind.name], 1e-4)
    assert found == tabled(kind, "sgl", found)


def test_adapters_of_other_models_are_rejected(lm, others):
    check_refused(lm, others)
