"""Every kind of adapter that PEFT saves is applied correctly or rejected, as ``docs/adapters.md``
says."""

from __future__ import annotations

import pytest

from genlm.vllm import AsyncVirtualLM
from tests.adapter_kinds import KINDS
from tests.adapter_outcomes import make_case, outcome
from tests.adapter_table import check_refused, strangers, tabled

from .driven import SMALL


@pytest.fixture(scope="module")
def lm(tiny_path):
    # Two slots, because vLLM's error on a CPU shows if the last one is used.
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **SMALL}
    with AsyncVirtualLM.from_name(tiny_path, engine_opts=options, cache_size=0) as model:
        yield model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_lora_kind_has_the_outcome_of_the_table(lm, tiny_path, tmp_path, kind):
    found = outcome(lm, make_case(kind, tiny_path, tmp_path), 5e-4)
    assert found == tabled(kind, "vllm", found)


def test_adapters_of_other_models_are_rejected(lm, tiny_path, tmp_path):
    check_refused(lm, strangers(tiny_path, tmp_path))
