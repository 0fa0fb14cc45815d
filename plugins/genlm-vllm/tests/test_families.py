"""Every setting of a configuration is computed as in transformers; costly_sweep.py tries all of
them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.hub_folders import HUB, loaded
from tests.sweep import SCALED, THRESHOLD
from tools.families import recorded

from .families import SWEEP

PLAIN = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, **SCALED, "factor": 2.0}
WHOLE = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
LAYERS = ["full_attention", "sliding_attention"]

CHANGES = {
    "gemma4_text": [{"rope_parameters": {"sliding_attention": YARN, "full_attention": WHOLE}}],
    "granitemoehybrid": [],  # with a prompt of two blocks
    "nemotron": [{"hidden_act": "silu"}, {"rope_parameters": PLAIN}],
    # The family has no types of layers.
    "starcoder2": [{"sliding_window": THRESHOLD, "layer_types": LAYERS}],
}


@pytest.mark.parametrize("family", CHANGES)
def test_rows_match_transformers(family: str, tmp_path: Path) -> None:
    found = SWEEP.of(family, tmp_path, lambda _: CHANGES[family])
    if "not implemented for 'Float'" in found[0].why:
        pytest.skip("before 0.32, vLLM has no kernel for Mamba in float32 on a CPU")
    assert [one.outcome for one in found] == ["right"] * (1 + len(CHANGES[family])), found
    assert recorded("vllm", family).outcome == "right", "the table of models says otherwise"


#: Changes for which a checkpoint has weights that vLLM's class of the family lacks.
LEFT_OUT = {
    "cohere": ({"attention_bias": True}, r"self_attn\.\w_proj\.bias \(8 weights"),
    "cohere2": ({"tie_word_embeddings": False}, r"lm_head\.weight \(1 weights"),
    "ernie4_5": ({"use_bias": True}, r"\w_proj\.bias \(14 weights"),
    "gemma": ({"attention_bias": True}, r"self_attn\.\w_proj\.bias \(8 weights"),
    "olmoe": ({"attention_bias": True}, r"self_attn\.\w_proj\.bias \(8 weights"),
    "qwen3": ({"attention_bias": True}, r"self_attn\.o_proj\.bias \(2 weights"),
}

#: And changes for which it lacks weights that vLLM's class has: of the first kind vLLM would serve
#: what was in memory.
LACKING = {
    "gpt_oss": ({"tie_word_embeddings": True}, r"finds no weights of gpt_oss for lm_head\.weight"),
    "olmoe": ({"tie_word_embeddings": True}, r"finds no weights of olmoe for lm_head\.weight"),
    "qwen2_moe": (
        {"qkv_bias": False},
        r"for model\.layers\.0\.self_attn\.qkv_proj\.bias",
    ),
    "stablelm": ({"use_parallel_residual": True}, r"not initialized .*post_attention_layernorm"),
}

#: The words of vLLM's own errors about weights.
UNKNOWN = {"stablelm": ({"qk_layernorm": True}, r"no module .*\.self_attn\.[kq]_layernorm")}


@pytest.mark.parametrize("family", LEFT_OUT)
def test_weights_that_vllm_would_leave_out_are_rejected(family: str, tmp_path: Path) -> None:
    """Without the proof, which would not run of large folders."""
    change, named = LEFT_OUT[family]
    found = SWEEP.changed(family, tmp_path, change)
    assert found.outcome == "refused", found
    assert recorded("vllm", family).outcome == "right", "it is refused without the change too"
    assert re.search(rf"{named} .*vLLM leaves them out of {family}; load it with", found.why), found


@pytest.mark.parametrize(
    ("family", "change", "said"),
    [
        *((family, *each) for family, each in LACKING.items()),
        *((family, *each) for family, each in UNKNOWN.items()),
    ],
)
def test_weights_that_a_checkpoint_cannot_have_are_rejected(
    family: str, change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    found = SWEEP.changed(family, tmp_path, change)
    assert found.outcome == "refused", found
    assert recorded("vllm", family).outcome == "right", "it is refused without the change too"
    assert re.search(said, found.why), found


#: Families that vLLM cannot load from their folders, each with the reason.
REFUSED = {
    "another family's scale": "logit_scale=0.1 of llama: vLLM applies it",
    "names without their beginning": "vLLM cannot serve .*'embed_tokens'",
    "old buffers, and no last norm": r"were not initialized .*model\.norm\.weight.*backend=\"hf\"",
}


@pytest.mark.parametrize("name", HUB)
def test_folders_in_the_hubs_layout_load(name: str, tmp_path: Path) -> None:
    found = loaded(name, SWEEP, tmp_path)
    assert found.outcome == ("refused" if name in REFUSED else "right"), found
    assert re.search(REFUSED.get(name, ""), found.why)
