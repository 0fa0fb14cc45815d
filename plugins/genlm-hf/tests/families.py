"""Small models of every causal family that transformers has."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.kit.twin import small_model, thresholds

from .shapes import DEVICE

#: What the configurations of some families leave open, though none of their models does.
LEFT_OPEN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "dots1": {"q_lora_rank": None, "head_dim": 128, "num_key_value_heads": 32},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},  # in two layers, too
    "lfm2": {"layer_types": ["conv", "full_attention"] * 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 8},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}


def small_family(family: str, far: int) -> Any:
    """A small random model of a family, each of its thresholds at ``far`` tokens.

    Raises:
        Exception: whatever transformers says of such a model.
    """
    config = CONFIG_MAPPING[family](**LEFT_OPEN.get(family, {}))
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, kind.config_class):
        config = config.get_text_config(decoder=True)
    if hasattr(config, "is_decoder"):
        config.is_decoder = True
    changed = {one.path: far for one in thresholds(config.to_dict())}
    return small_model(kind, config, DEVICE, changed)
