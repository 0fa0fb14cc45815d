"""Every setting of a configuration is computed as in transformers, or rejected by name. Cold rows
are compared on both sides of every threshold."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
import transformers
from mlx_lm.models import minicpm
from structlog.testing import capture_logs
from transformers import AutoModelForCausalLM

from genlm.core import Query
from genlm.core.errors import EngineError
from genlm.mlx.loading import load
from genlm.mlx.repairs import repair
from genlm.mlx.settings import refuse_unread

from .conftest import CONFIGS, HEADS, SIZES
from .watched import Folders

Saved = Callable[[Any], str]

#: The value of every threshold, and the lengths that are tried.
THRESHOLD = 20
LENGTHS = (
    5,
    THRESHOLD - 1,
    THRESHOLD,
    THRESHOLD + 1,
    THRESHOLD + 2,
    2 * THRESHOLD,
    2 * THRESHOLD + 1,
    4 * THRESHOLD,
)

#: The largest difference of rows. Some models of mlx-lm compute GELU exactly where transformers
#: approximates it, or the other way round.
MAX_NATS = 5e-3

SHAPE = {**SIZES, **HEADS, "max_position_embeddings": 5 * THRESHOLD, "pad_token_id": 0}
GEMMA = {**SHAPE, "query_pre_attn_scalar": 8, "hidden_size": 64}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16}
WINDOW = {"sliding_window": THRESHOLD, "use_sliding_window": True}
MIXED = ["full_attention", "sliding_attention", "full_attention"]


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    far = {"original_max_position_embeddings": THRESHOLD, "factor": 4.0}
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **far, **settings}}


def longrope(features: int, **settings: Any) -> dict[str, Any]:
    pairs = range(features // 2)
    factors = {
        "short_factor": [1 + 0.1 * i for i in pairs],
        "long_factor": [3.0 + i for i in pairs],
    }
    return rope("longrope", **factors, **settings)


LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
MINICPM3 = {
    **{**SHAPE, **longrope(8), **LATENT, "num_key_value_heads": 4},
    **{"v_head_dim": 8, "dim_model_base": 8},
}
DEEPSEEK = {
    **{**SHAPE, **LATENT, "num_key_value_heads": 4, "v_head_dim": 8, "n_group": 1},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    **{"topk_method": "greedy", "topk_group": 1},
}

#: Name of the configuration and arguments.
RIGHT = {
    "mistral, window in some layers": ("Mistral", {**SHAPE, **WINDOW, "layer_types": MIXED}),
    "mixtral, window and linear": ("Mixtral", {**SHAPE, **WINDOW, **EXPERTS, **rope("linear")}),
    "phi3, window and some features": (
        "Phi3",
        {**SHAPE, **WINDOW, **rope("default", partial_rotary_factor=0.5)},
    ),
    "qwen2, window in some layers": ("Qwen2", {**SHAPE, **WINDOW, "max_window_layers": 1}),
    "qwen2, window that is switched off": ("Qwen2", {**SHAPE, "sliding_window": THRESHOLD}),
    "ministral 3, window": ("Ministral3", {**SHAPE, "sliding_window": THRESHOLD}),
    "gemma2, window in some layers": ("Gemma2", {**GEMMA, **WINDOW}),
    "gemma3, fewer layers than its pattern": (
        "Gemma3Text",
        {**GEMMA, **WINDOW, "num_hidden_layers": 4},
    ),
    "gemma3, types of layers of its own": (
        "Gemma3Text",
        {**GEMMA, **WINDOW, "layer_types": MIXED},
    ),
    "cohere2, fewer layers than its pattern": (
        "Cohere2",
        {**SHAPE, **WINDOW, "hidden_size": 32, "logit_scale": 1.0},
    ),
    "llama, linear": ("Llama", {**SHAPE, **rope("linear")}),
    "llama, llama3": (
        "Llama",
        {**SHAPE, **rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0)},
    ),
    "llama, yarn with a factor of attention": (
        "Llama",
        {**SHAPE, **rope("yarn", attention_factor=1.5)},
    ),
    "llama, yarn with mscale alone": ("Llama", {**SHAPE, **rope("yarn", mscale=1.5)}),
    "llama, yarn not truncated": ("Llama", {**SHAPE, **rope("yarn", truncate=False)}),
    "llama, dynamic": ("Llama", {**SHAPE, **rope("dynamic")}),
    "cohere, yarn": ("Cohere", {**SHAPE, **rope("yarn"), "logit_scale": 1.0}),
    "recurrent_gemma, windows in the layers that attend": (
        "RecurrentGemma",
        {
            **{
                **SHAPE,
                "attention_window_size": THRESHOLD,
                "block_types": ["recurrent", "attention"],
            },
            **{"lru_width": 32, "logits_soft_cap": 3.0, "num_key_value_heads": 1},
        },
    ),
    "glm, linear in some features": (
        "Glm",
        {**SHAPE, **rope("linear", partial_rotary_factor=0.5)},
    ),
    "minicpm3, tied": ("MiniCPM3", {**MINICPM3, "tie_word_embeddings": True}),
    "minicpm3, untied": ("MiniCPM3", {**MINICPM3, "tie_word_embeddings": False}),
    "deepseek_v2, yarn with a factor of attention": (
        "DeepseekV2",
        {**DEEPSEEK, **rope("yarn", mscale=0.7, mscale_all_dim=0.7, attention_factor=1.5)},
    ),
    "gpt_neox, some features": (
        "GPTNeoX",
        {**SHAPE, "intermediate_size": 128, **rope("default", partial_rotary_factor=0.5)},
    ),
    "phi3, longrope": ("Phi3", {**SHAPE, **longrope(8)}),
    "llama, longrope": ("Llama", {**SHAPE, **longrope(8, attention_factor=1.3)}),
    "phimoe, longrope with factors of its own": (
        "Phimoe",
        {
            **{**SHAPE, **EXPERTS, "attention_bias": True, "lm_head_bias": True},
            **longrope(8, short_mscale=1.5, long_mscale=1.5),
        },
    ),
}

#: The message of the error, and the configuration.
REFUSED = {
    "hidden_act=": ("Llama", {**SHAPE, "hidden_act": "gelu"}),
    "activation_function=": (
        "GPT2",
        {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "activation_function": "relu", "n_head": 4},
    ),
    "final_logit_softcapping=": ("Gemma3Text", {**GEMMA, "final_logit_softcapping": 5.0}),
    "use_bidirectional_attention=": ("Gemma", {**GEMMA, "use_bidirectional_attention": True}),
    "clip_qkv=": ("Olmoe", {**SHAPE, **EXPERTS, "clip_qkv": 0.3}),
    "norm_topk_prob=": ("Qwen2Moe", {**SHAPE, **EXPERTS, "norm_topk_prob": True}),
    "layer_types=": (
        "Gemma3Text",
        {**GEMMA, **WINDOW, "layer_types": MIXED * 2, "num_hidden_layers": 6},
    ),
    "e_score_correction_bias of ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**SHAPE, **EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    ),
    # It fails at the first row, because rotary embeddings need more than a single feature.
    "family 'gpt_neox'": (
        "GPTNeoX",
        {**SHAPE, "intermediate_size": 128, **rope("yarn", partial_rotary_factor=0.125)},
    ),
}


def made(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(transformers, f"{name}Config")(**arguments)


@pytest.mark.parametrize("case", [*RIGHT, "gpt2", "mamba", "lfm2", "falcon_h1"])
def test_rows_and_scores_equal_transformers(case: str, saved: Saved, folders: Folders) -> None:
    """The scored continuation crosses every threshold."""
    folder = str(folders(case)) if case in CONFIGS else saved(made(*RIGHT[case]))
    engine = load(folder, {})
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    whole = random.Random(case).choices(range(256), k=LENGTHS[-1])
    tried = [n for n in LENGTHS if engine.max_context is None or n <= engine.max_context]
    assert len(tried) > 2
    rows = {}
    for length in tried:
        with torch.no_grad():
            logits = reference(torch.tensor([whole[:length]]), use_cache=False).logits[0, -1]
        (row,) = engine.logprobs([Query(tuple(whole[:length]), cold=True)])
        rows[length] = logits.log_softmax(-1)
        torch.testing.assert_close(row, rows[length], atol=MAX_NATS, rtol=0)
        (warm,) = engine.logprobs([Query(tuple(whole[:length]))])
        torch.testing.assert_close(warm, row, atol=MAX_NATS, rtol=0)
    (scores,) = engine.genlm_sequence_logprobs(
        [Query(tuple(whole[: tried[0]]))],
        [tuple(whole[tried[0] : tried[-1]])],
        engine.vocab_size,
    )
    expected = [rows[length][whole[length]] for length in tried[:-1]]
    found = [scores[length - tried[0]] for length in tried[:-1]]
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), atol=MAX_NATS, rtol=0)


@pytest.mark.parametrize("said", REFUSED)
def test_setting_that_mlx_lm_cannot_compute_is_rejected_by_name(said: str, saved: Saved) -> None:
    with pytest.raises(EngineError, match=f"{said}.*; load it with backend='hf'"):
        load(saved(made(*REFUSED[said])), {})


@pytest.mark.parametrize(
    ("family", "name", "given"),
    [
        (
            "Glm4MoeLite",
            "partial_rotary_factor",
            {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        ),
        ("MiniCPM3", "mscale_all_dim", rope("yarn", mscale_all_dim=0.7)),
        ("Afmoe", "n_group", {"n_group": 2}),
        ("GraniteMoeHybrid", "mamba_n_groups", {"mamba_n_groups": 2}),
        ("Jamba", "num_experts", {"num_experts": 4}),
        ("Mamba2", "n_groups", {"n_groups": 2}),
        ("DeepseekV3", "num_experts_per_tok", {"num_experts_per_tok": 1}),
        ("NemotronH", "num_experts_per_tok", {"num_experts_per_tok": 1}),
        ("Phimoe", "num_experts_per_tok", {"num_experts_per_tok": 3}),
    ],
)
def test_values_that_mlx_lm_misreads_are_rejected(
    family: str, name: str, given: dict[str, Any]
) -> None:
    with pytest.raises(EngineError, match=f"{name}=.*; load it with backend='hf'"):
        refuse_unread(made(family, given), model=None)
    usual = {"Jamba": {"num_experts": 1}, "Mamba2": {"n_groups": 1}}
    refuse_unread(made(family, usual.get(family, {})), model=None)


def test_a_tied_head_of_minicpm_is_scaled_as_one_of_its_own() -> None:
    """MiniCPM's first versions are not transformers'."""
    sizes = {"hidden_size": 16, "dim_model_base": 4, "num_attention_heads": 2, "vocab_size": 64}
    args = minicpm.ModelArgs(
        **sizes, model_type="minicpm", num_hidden_layers=2, intermediate_size=24,
        num_key_value_heads=2, rms_norm_eps=1e-5, scale_depth=1.4, scale_emb=12.0,
    )  # fmt: skip
    untied, tied = minicpm.Model(args), minicpm.Model(replace(args, tie_word_embeddings=True))
    untied.lm_head.weight = untied.model.embed_tokens.weight
    tied.model.update(untied.model.parameters())
    repair(tied)
    found, expected = (np.array(model(mx.array([[1, 2, 3]]))) for model in (tied, untied))
    np.testing.assert_allclose(found, expected, atol=1e-5)


FAMILIES = ["falcon_h1", "gemma2", "llama", "mixtral", "qwen2"]


@pytest.mark.parametrize("family", FAMILIES)
def test_reloaded_weights_are_computed_like_the_first(
    family: str, saved: Saved, tmp_path: Path
) -> None:
    """In another type, too. Nothing of a repair is in the weights."""
    mixtral = made("Mixtral", {**SHAPE, **EXPERTS})
    config = mixtral if family == "mixtral" else deepcopy(CONFIGS[family])
    engine = load(saved(config), {})
    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    other.save_pretrained(tmp_path / "other")
    sanitize = getattr(engine.model, "sanitize", dict)
    for dtype, near in ((mx.float32, MAX_NATS), (mx.bfloat16, 0.3)):
        found = mx.load(str(tmp_path / "other" / "model.safetensors"))
        weights = sanitize({name: each.astype(dtype) for name, each in found.items()})
        engine.model.load_weights([*weights.items()])
        engine.genlm_clear_kv_cache()
        (row,) = engine.logprobs([Query((5, 6, 7, 8, 9))])
        with torch.no_grad():
            expected = other(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, -1].log_softmax(-1)
        torch.testing.assert_close(row[:256], expected, atol=near, rtol=0)


ON_THE_HUB = {
    "Gemma2": ({**GEMMA, **WINDOW}, {"hidden_act": "gelu_pytorch_tanh"}),
    "Exaone4": (
        {**SHAPE, "sliding_window": THRESHOLD, "num_hidden_layers": 4},
        {"sliding_window_pattern": "LLLG", "rope_scaling": None},
    ),
}


@pytest.mark.parametrize("family", ON_THE_HUB)
def test_settings_that_only_the_hub_writes_are_accepted(family: str, saved: Saved) -> None:
    given, written = ON_THE_HUB[family]
    folder = saved(made(family, given))
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    engine = load(folder, {})
    ids = tuple(random.Random(1).choices(range(256), k=2 * THRESHOLD + 1))
    reference = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0, -1].log_softmax(-1)
    (row,) = engine.logprobs([Query(ids, cold=True)])
    torch.testing.assert_close(row, expected, atol=MAX_NATS, rtol=0)


def test_experts_in_bfloat16_give_the_rows_of_transformers(saved: Saved) -> None:
    folder = saved(made("Mixtral", {**SHAPE, **EXPERTS}))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    reference.save_pretrained(folder)
    (row,) = load(folder, {}).logprobs([Query((5, 6, 7))])
    with torch.no_grad():
        expected = reference.float()(torch.tensor([[5, 6, 7]])).logits[0, -1].log_softmax(-1)
    assert (row - expected).abs().max() < 0.2


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_rotary_embedding_that_stretches_takes_more(saved: Saved, kind: str) -> None:
    """The longest context is multiplied by the configuration's factor, with right rows."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    original = {"original_max_position_embeddings": 20} if kind == "yarn" else {}
    folder = saved(made("Llama", {**SHAPE, "max_position_embeddings": 20,
                                  "rope_parameters": {**rope, **original}}))  # fmt: skip
    engine = load(folder, {})
    assert engine.max_context == 80
    ids = tuple(range(5, 75))
    (row,) = engine.logprobs([Query(ids)])
    with torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder)
        expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    torch.testing.assert_close(row, expected, atol=MAX_NATS, rtol=0)


def test_unrepairable_window_limits_the_context(
    saved: Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("genlm.mlx.windows._takes_mask", lambda attention: False)
    with capture_logs() as logs:
        engine = load(saved(made(*RIGHT["qwen2, window in some layers"])), {})
    assert engine.max_context == THRESHOLD
    (warning,) = [one for one in logs if one["event"] == "context.limited"]
    assert (warning["log_level"], warning["to"]) == ("warning", THRESHOLD)
    assert "sliding_window" in warning["why"]
