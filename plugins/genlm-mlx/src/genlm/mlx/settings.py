"""The settings that mlx-lm does not read."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from genlm.core.errors import EngineError
from genlm.kit.settings import alike, is_read

#: Settings for which mlx-lm's models always use the family's default, even if they have the name.
FIXED = re.compile(r"(^|_)act(ivation)?(_|$)")

#: Settings that change rows, and that some models of mlx-lm ignore because they lack the name.
PERHAPS_READ = re.compile(
    r"softcapping$|^clip_qkv$|^norm_topk_prob$|^rope_interleave$|^use_bidirectional_attention$"
    r"|^scale_attn_(weights|by_inverse_layer_idx)$"
)

#: Families whose rows are wrong for every checkpoint, with the reason.
WRONG = {"ernie4_5_moe": "leaves out the router's e_score_correction_bias"}


def _several(number: int | None) -> bool:
    return (number or 1) > 1


#: Settings of single families that mlx-lm computes differently, with a test for the affected
#: values. mlx-lm chooses among groups of AFMoE's experts; does not count the features that latent
#: attention rotates (GLM-4 MoE Lite); normalises all groups of Mamba 2's features together; makes
#: the weights of Jamba's experts sum to one; leaves out a factor of latent attention's scores
#: (MiniCPM 3); and mixes only two of Phi-3.5-MoE's experts.
MISREAD: dict[tuple[str, str], Callable[[Any], bool]] = {
    ("afmoe", "n_group"): _several,
    ("glm4_moe_lite", "partial_rotary_factor"): lambda factor: factor not in (None, 1),
    ("granitemoehybrid", "mamba_n_groups"): _several,
    ("jamba", "num_experts"): _several,
    ("mamba2", "n_groups"): _several,
    ("minicpm3", "mscale_all_dim"): bool,
    ("phimoe", "num_experts_per_tok"): lambda experts: experts != 2,
}

#: Families in which mlx-lm normalises the weights of several experts, but not the weight of a
#: single one.
ONE_EXPERT = (
    "afmoe", "bailing_hybrid", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "mimo_v2_flash", "nemotron_h", "solar_open",
)  # fmt: skip


def refuse_unread(settings: Any, model: Any) -> None:
    """Reject a checkpoint whose rows mlx-lm would get wrong.

    Raises:
        EngineError: a setting differs from the family's default, and the model does not read it; or
            rows of this family are always wrong.
    """
    if settings.model_type in WRONG:
        raise EngineError(
            f"mlx-lm {WRONG[settings.model_type]} of {settings.model_type}, so its rows would be "
            "wrong; load it with backend='hf'"
        )
    rope = getattr(settings, "rope_parameters", None) or {}
    misread = dict(MISREAD)
    if settings.model_type in ONE_EXPERT and getattr(settings, "norm_topk_prob", True):
        misread[settings.model_type, "num_experts_per_tok"] = lambda experts: experts == 1
    for (family, name), wrong in misread.items():
        value = rope.get(name, getattr(settings, name, None))
        if settings.model_type == family and wrong(value):
            raise EngineError(
                f"the checkpoint has {name}={value!r}, which mlx-lm's {family} computes "
                "differently from transformers; load it with backend='hf'"
            )
    inner = getattr(model, "language_model", model)
    read = getattr(inner, "args", None)
    try:
        defaults = type(settings)().to_dict()
    except Exception:  # some classes have no settings
        return
    for name, value in settings.to_dict().items():
        usual = defaults.get(name, getattr(type(read), name, None))
        known = name in defaults or is_read(settings.model_type, name)
        unread = (FIXED.search(name) and isinstance(value, str) and known) or (
            PERHAPS_READ.search(name) and hasattr(read, name) is not known
        )
        if unread and not alike(value, usual):
            raise EngineError(
                f"the checkpoint has {name}={value!r}, but mlx-lm computes this family "
                f"({settings.model_type}) with {usual!r}; load it with backend='hf'"
            )
