"""What a configuration says is computed as transformers does; costly_sweep.py tries all of it."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from genlm.core import EngineError
from genlm.sgl.repairs import repair
from tests.hub_folders import HUB, loaded
from tests.sweep import FAR, ROPES

from .families import SWEEP

WINDOWED = {"sliding_window": FAR, "use_sliding_window": True}
SCALED = {
    "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
CHANGES = {
    "mistral": [WINDOWED],
    "cohere2": [{"layer_types": ["sliding_attention", "full_attention"]}],
    "gemma2": [{"attn_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}],
    "gemma3_text": [{"rope_parameters": SCALED}],
    "olmo2": [],
    "ministral3": [],
    "qwen3_moe": [],  # and another model after it
    "qwen2": [WINDOWED, *ROPES[:3]],
}


@pytest.mark.parametrize("family", CHANGES)
def test_rows_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    def changes(settings):
        for change in CHANGES[family]:
            if "rope_type" in change:
                parameters = {**settings["rope_parameters"], **change}
                yield {"rope_parameters": parameters, "max_position_embeddings": 5 * FAR}
            else:
                yield change

    found = SWEEP.of(family, tmp_path, changes)
    assert [one for one in found if one.outcome != "right"] == []
    assert len(found) == 1 + len(CHANGES[family])


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("olmo2", {"hidden_act": "gelu"}),
        ("gemma2", {"tie_word_embeddings": False}),
        ("olmoe", {"norm_topk_prob": True}),
        ("olmoe", {"clip_qkv": 0.3}),
        ("gpt_bigcode", {"scale_attn_weights": False}),
        ("gpt2", {"activation_function": "relu"}),
        ("opt", {"activation_function": "silu"}),
        ("phi", {"qk_layernorm": True}),
    ],
)
def test_a_setting_that_the_engine_leaves_out_is_refused(family, change, tmp_path: Path) -> None:
    _, changed = SWEEP.of(family, tmp_path, lambda _: [change])
    assert changed.outcome == "refused"
    assert "{}={!r}".format(*next(iter(change.items()))) in changed.why


def test_the_activation_of_experts_is_compared_too() -> None:
    experts = torch.nn.Identity()
    experts.moe_runner_config = SimpleNamespace(activation="silu")
    settings = AutoConfig.for_model("cohere2_moe", hidden_act="relu")
    with pytest.raises(EngineError, match=r"hidden_act='relu', and .*2_moe computes SiluAndMul"):
        repair(experts, settings, ours=True)


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    """Its keys happen to be as wide as what SGLang keeps of them. Early releases ask the platform
    for a pool of them, and say no word if it has none."""
    (found,) = SWEEP.of("glm4_moe_lite", tmp_path)
    assert found.outcome == "refused"
    silent = r"\(glm4_moe_lite\) here: NotImplementedError: raised in .*mla_kv_pool_cls; load it"
    assert re.search(rf"no latent attention for glm4_moe_lite|{silent}", found.why)


#: What SGLang cannot do of it.
REFUSED = {
    "another family's scale": "logit_scale=0.1, and SGLang's llama applies it",
    "no architecture": "SGLang cannot serve",
    "a head beside tied embeddings": "lm_head.weight that differs from its embeddings",
    "names without their beginning": "no weights of LlamaForCausalLM for model.embed_tokens.weight",
    "old buffers, and no last norm": r"for model\.norm\.weight \(1 of ",
}


@pytest.mark.parametrize("name", HUB)
def test_folders_as_the_hub_has_them(name: str, tmp_path: Path) -> None:
    found = loaded(name, SWEEP, tmp_path)
    assert found.outcome == ("refused" if name in REFUSED else "right"), found
    assert re.search(REFUSED.get(name, ""), found.why)
