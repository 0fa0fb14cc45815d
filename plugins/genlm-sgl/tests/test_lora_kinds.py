"""Every kind of adapter that PEFT saves is right, or refused; ``docs/adapters.md`` says which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from sgl_torch_cpu import without_pinned_memory

from genlm.core import InvalidAdapterError
from genlm.core.conformance.adapter_kinds import KINDS, make_adapter
from genlm.core.conformance.adapter_outcomes import make_case, outcome
from genlm.sgl import AsyncSGLTransformer
from tests.adapter_table import tabled

DOCS = Path(__file__).parents[3] / "docs" / "adapters.md"


@pytest.fixture(scope="module")
def cases(tiny, tmp_path_factory):
    """Made first: with the model below, transformers loads none."""
    return {kind.name: make_case(kind, tiny, tmp_path_factory.mktemp("case")) for kind in KINDS}


@pytest.fixture(scope="module")
def strangers(tiny, tmp_path_factory):
    """Adapters of other models, by what the error says of them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {
        r"it maps 32 to 32 features, the model 64 to 64": {"hidden_size": 32},
        r"v_proj it maps 64 to 32 features, the model 64 to 64": {"num_key_value_heads": 2},
        r"adapts model\.layers\.2.*no such module": {"num_hidden_layers": 3},
    }
    paths = {}
    for message, change in changes.items():
        folder = tmp_path_factory.mktemp("stranger")
        config = AutoConfig.from_pretrained(tiny, **change)
        config.head_dim = config.hidden_size // config.num_attention_heads
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
        paths[message] = make_adapter(KINDS[0], str(folder / "model"), folder / "adapter")
    return paths


@pytest.fixture(scope="module")
def lm(tiny, cases, strangers):
    options = {"enable_lora": True, "max_loras_per_batch": 3, "max_total_tokens": 4096}
    with (
        without_pinned_memory(),
        AsyncSGLTransformer.from_name(tiny, engine_opts=options, cache_size=0) as model,
    ):
        yield model


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind(lm, cases, kind):
    found = outcome(lm, cases[kind.name], 1e-4)
    assert found == tabled(DOCS, kind, "sgl", found)


def test_an_adapter_of_another_model_names_both_shapes(lm, strangers):
    before = lm.next_token_logprobs_uncached([1, 2, 3])
    for message, path in strangers.items():
        with pytest.raises(InvalidAdapterError, match=message):
            lm.add_new_lora(path, "stranger")
    assert torch.equal(lm.next_token_logprobs_uncached([1, 2, 3]), before)
