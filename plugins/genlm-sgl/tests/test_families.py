"""Every setting of a configuration is computed as in transformers; costly_sweep.py tries all of
them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from genlm.core import EngineError
from genlm.sgl.loading import load
from genlm.sgl.repairs import repair
from tests.adapter_outcomes import reference_rows
from tests.hub_folders import HUB, loaded
from tests.published_models import write
from tests.sweep import ROPES, THRESHOLD
from tools.families import recorded
from tools.tiny import write_tokenizer

from .families import SWEEP, opened

WINDOWED = {"sliding_window": THRESHOLD, "use_sliding_window": True}
MIXED = ["sliding_attention", "full_attention"]
SCALED = {
    "sliding_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
#: Changes of a family's configuration that SGLang computes, and changes that it ignores.
RIGHT = {
    "cohere2": [{"layer_types": ["sliding_attention", "full_attention"]}],
    "gemma2": [{"attn_logit_softcapping": 3.0}, {"final_logit_softcapping": 3.0}],
    "gemma3_text": [{"rope_parameters": SCALED}],
    "ministral3": [],
    "mistral": [WINDOWED],
    "olmo3": [{"sliding_window": THRESHOLD, "layer_types": MIXED}],  # runs by transformers' code
    "qwen3_moe": [],  # so does another model after it
    "qwen2": [WINDOWED, *ROPES[:3]],
    "vaultgemma": [{"attn_logit_softcapping": 1.0}],  # runs by transformers' code
}
REFUSED = {
    "gpt_bigcode": [{"scale_attn_weights": False}],
    "gpt2": [{"activation_function": "relu"}],
    "hyperclovax": [{"logits_scaling": 2.0}],  # runs by transformers' code
    "olmo2": [{"hidden_act": "gelu"}],
    "olmoe": [{"norm_topk_prob": True}, {"clip_qkv": 0.3}],
    "opt": [{"activation_function": "silu"}],
}
#: Changes for which a checkpoint has weights that SGLang's class of the family lacks.
LEFT_OUT = {
    "gemma": ({"attention_bias": True}, r"self_attn\.\w_proj\.bias \(8 weights"),
    "gemma2": ({"tie_word_embeddings": False}, r"lm_head\.weight \(1 weights"),
    "granitemoe": ({"attention_bias": True}, r"self_attn\.\w_proj\.bias \(8 weights"),
    "llama": ({"mlp_bias": True}, r"mlp\.\w+_proj\.bias \(6 weights"),
    "phi": ({}, r"lm_head\.bias \(1 weights"),  # every checkpoint of the family has this weight
}


@pytest.mark.parametrize("family", {**RIGHT, **REFUSED})
def test_settings_are_computed_or_rejected(family: str, tmp_path: Path) -> None:
    right, refused = RIGHT.get(family, []), REFUSED.get(family, [])

    def changes(settings):
        for change in [*right, *refused]:
            if "rope_type" in change:
                parameters = {**settings["rope_parameters"], **change}
                yield {"rope_parameters": parameters, "max_position_embeddings": 5 * THRESHOLD}
            else:
                yield change

    found = SWEEP.of(family, tmp_path, changes)
    assert len(found) == 1 + len(right) + len(refused)
    for one in found[: 1 + len(right)]:
        assert one.outcome == "right", one
    # Families that SGLang runs by transformers' code are not recorded.
    known = recorded("sgl", family)
    assert known is None or known.outcome == "right", "the table of models says otherwise"
    for one in found[1 + len(right) :]:
        ((name, value),) = one.changed.items()
        assert one.outcome == "refused", one
        assert f"{name}={value!r}" in one.why


@pytest.mark.parametrize("family", LEFT_OUT)
def test_weights_that_sglang_would_leave_out_are_rejected(family: str, tmp_path: Path) -> None:
    change, named = LEFT_OUT[family]
    *_, found = SWEEP.of(family, tmp_path, lambda _: [change])
    assert found.changed == change
    assert found.outcome == "refused", found
    assert re.search(rf"{named} .*SGLang leaves them out of {family}; load it with", found.why)


def test_settings_that_transformers_code_reads_are_not_rejected(tmp_path: Path) -> None:
    """SGLang runs the family by transformers' code, and its own code does not name the setting."""
    sizes = {"hidden_size": 64, "kv_channels": 16, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_key_value_heads": 4, "num_local_experts": 4, "num_experts_per_tok": 1}
    config = AutoConfig.for_model(
        "jetmoe", **sizes, **heads, vocab_size=257, activation_function="relu",
        max_position_embeddings=512, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "<end>")
    ids = (5, 9, 13, 66, 200)
    (expected,) = reference_rows(str(tmp_path), None, [ids])
    with opened(tmp_path) as (_, row):
        torch.testing.assert_close(row(ids), expected, atol=2e-3, rtol=0)


def test_the_activation_of_experts_is_compared_too() -> None:
    experts = torch.nn.Identity()
    experts.moe_runner_config = SimpleNamespace(activation="silu")
    settings = AutoConfig.for_model("cohere2_moe", hidden_act="relu")
    with pytest.raises(EngineError, match=r"hidden_act='relu', and .*2_moe computes SiluAndMul"):
        repair(experts, settings, ours=True)


def test_latent_attention_is_rejected_by_name(tmp_path: Path) -> None:
    """The keys happen to be as wide as what SGLang keeps of them. Early releases ask the platform
    for a pool of them, and give no error if it has none."""
    (found,) = SWEEP.of("glm4_moe_lite", tmp_path)
    assert found.outcome == "refused"
    silent = r"\(glm4_moe_lite\) here: NotImplementedError: raised in .*mla_kv_pool_cls; .*load it"
    assert re.search(rf"no latent attention for glm4_moe_lite|{silent}", found.why)


YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 0.7}


def test_the_scale_of_yarn_is_compared_where_attention_is_latent(tmp_path: Path) -> None:
    """SGLang scales the scores of DeepSeek's models as transformers does, in a module apart from
    theirs. It does not scale those of MiniCPM3."""
    write("DeepSeek V3 in bfloat16", tmp_path / "deepseek", "float32")
    file = tmp_path / "deepseek" / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("auto_map")
    file.write_text(json.dumps(settings))
    with pytest.raises(EngineError, match=r"no latent attention for deepseek_v3|mla_kv_pool_cls"):
        load(str(file.parent), {"engine_opts": {"max_total_tokens": 512}})

    def change(settings):
        rope = {**settings["rope_parameters"], **YARN}
        rope["original_max_position_embeddings"] = THRESHOLD
        yield {"rope_parameters": rope, "max_position_embeddings": 4 * THRESHOLD}

    *_, found = SWEEP.of("minicpm3", tmp_path, change)
    assert found.outcome == "refused", found
    assert "mscale_all_dim=0.7, and SGLang's minicpm3 leaves it out" in found.why


def test_layers_with_a_state_are_rejected_where_transformers_code_runs(tmp_path: Path) -> None:
    """SGLang would keep no state, and its attention would not be used."""
    write("RecurrentGemma 2B", tmp_path, "float32")
    said = r"has layers with a state, and SGLang's recurrent_gemma keeps no state of them"
    with pytest.raises(EngineError, match=said):
        load(str(tmp_path), {"engine_opts": {"max_total_tokens": 512}})


#: Families that SGLang cannot load from their folders, each with the reason.
REFUSED_FOLDERS = {
    "another family's scale": "logit_scale=0.1, and SGLang's llama applies it",
    "no architecture": "SGLang cannot serve",
    "a head beside tied embeddings": "model.embed_tokens.weight and lm_head.weight of .* differ",
    "names without their beginning": "no weights of LlamaForCausalLM for model.embed_tokens.weight",
    "old buffers, and no last norm": r"for model\.norm\.weight \(1 in all\)",
}


@pytest.mark.parametrize("name", HUB)
def test_folders_in_the_hubs_layout_load(name: str, tmp_path: Path) -> None:
    found = loaded(name, SWEEP, tmp_path)
    assert found.outcome == ("refused" if name in REFUSED_FOLDERS else "right"), found
    assert re.search(REFUSED_FOLDERS.get(name, ""), found.why)
