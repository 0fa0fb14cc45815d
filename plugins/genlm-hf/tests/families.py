"""Small models of every causal family that transformers has, and of those that see or hear too."""

from __future__ import annotations

from typing import Any

from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from genlm.kit.scaled_copy import small_model, thresholds

from .shapes import DEVICE

FAMILIES = sorted(
    {
        kind.model_type
        for mapping in (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
        for kind in mapping
    }
)

#: The sections of rotary embeddings in three dimensions, by width.
MROPE = {"rope_type": "default", "rope_theta": 1e6}
WIDE_MROPE = {"text_config": {"rope_parameters": {**MROPE, "mrope_section": [16, 24, 24]}}}
HALF_MROPE = {
    "text_config": {
        "rope_parameters": {**MROPE, "mrope_section": [8, 12, 12], "partial_rotary_factor": 0.5}
    }
}

#: Settings without a default in the configuration of some families, although all of their models
#: have a value.
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dots1": {"q_lora_rank": None, "head_dim": 128, "num_key_value_heads": 32},
    "glm4v": HALF_MROPE,
    "glm46v": {"text_config": {"model_type": "glm4v_text", **HALF_MROPE["text_config"]}},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    # So that even two layers are of both kinds.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_vl": {
        "text_config": {"model_type": "lfm2", "layer_types": ["conv", "full_attention"] * 16}
    },
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "qwen2_vl": WIDE_MROPE,
    "qwen2_5_vl": WIDE_MROPE,
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


def small_family(family: str, far: int) -> Any:
    """A small random model of a family, each of its thresholds at ``far`` tokens.

    Raises:
        Exception: transformers' error for the model.
    """
    config = CONFIG_MAPPING[family](**LEFT_OPEN.get(family, {}))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    elif not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    eyes = getattr(config, "vision_config", None)
    if hasattr(eyes, "depth"):  # the number of layers has another name elsewhere
        eyes.depth = 1
    changed = {one.path: far for one in thresholds(config.to_dict())}
    return small_model(kind, config, DEVICE, changed)
