"""Every kind of adapter that PEFT saves is right, or refused; ``docs/adapters.md`` says which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from genlm.core import InvalidAdapterError
from genlm.core.conformance.adapter_kinds import KINDS, make_adapter
from genlm.core.conformance.adapter_outcomes import make_case, outcome
from genlm.vllm import AsyncVirtualLM
from tests.adapter_table import tabled

DOCS = Path(__file__).parents[3] / "docs" / "adapters.md"


@pytest.fixture(scope="module")
def lm(tiny_path, small_opts):
    # Two slots: vLLM's mistake on CPU shows where the last is taken.
    options = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, **small_opts}
    with AsyncVirtualLM.from_name(tiny_path, engine_opts=options, cache_size=0) as model:
        yield model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind(lm, tiny_path, tmp_path, kind):
    found = outcome(lm, make_case(kind, tiny_path, tmp_path), 5e-4)
    assert found == tabled(DOCS, kind, "vllm", found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, r"it maps 64 to 64 features, the model 128 to 128"),
        ({"num_key_value_heads": 4}, r"v_proj it maps 128 to 128 features, the model 128 to 64"),
        ({"num_hidden_layers": 3}, r"adapts model\.layers\.2.*no such module"),
    ],
)
def test_an_adapter_of_another_model_names_both_shapes(lm, tiny_path, tmp_path, change, message):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(tiny_path, **change)
    config.head_dim = config.hidden_size // config.num_attention_heads
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    path = make_adapter(KINDS[0], str(tmp_path / "model"), tmp_path / "adapter")
    before = lm.next_token_logprobs_uncached([1, 2, 3])
    with pytest.raises(InvalidAdapterError, match=message):
        lm.add_new_lora(path, "stranger")
    assert torch.equal(lm.next_token_logprobs_uncached([1, 2, 3]), before)
