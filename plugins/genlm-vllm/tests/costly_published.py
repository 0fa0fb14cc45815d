"""Folders of published models in vLLM. These tests are collected only if the file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.published_models import EveryPublishedModel

from .families import OPTIONS, loaded

#: Families that vLLM does not have, or no longer.
LACKING = {
    "Bamba 9B": "does not dispatch through the Transformers attention interface",
    "CodeGen 350M": "are not supported",
    "DeepSeek MoE 16B": "contains custom code",
    "EXAONE 3.5": "contains custom code",  # transformers 5.19 does not have it either
    "ERNIE 4.5 0.3B": "are not supported",
    "Falcon 7B of 2023": "was supported in vLLM until v0.28.0",
    "GPT-Neo 125M": "are not supported",
    "MPT 7B": "was supported in vLLM until v0.28.0",
    "MPT 7B StoryWriter": "was supported in vLLM until v0.28.0",
    "RecurrentGemma 2B": "does not dispatch through the Transformers attention interface",
    "StableLM 2 12B": "no module or parameter named 'model.layers.0.self_attn.k_layernorm'",
    "XGLM 564M": "are not supported",
}

#: Families that vLLM serves on a GPU only, or that are wrong on a CPU.
ON_A_GPU = {
    "DeepSeek V2": "computes latent attention differently on a CPU",
    "DeepSeek V2 Lite": "computes latent attention differently on a CPU",
    "DeepSeek V3 in bfloat16": "computes latent attention differently on a CPU",
    "LFM2 350M": "does not turn each head by its position on a CPU",
    "LFM2 8B A1B": "does not turn each head by its position on a CPU",
    "Falcon Mamba 7B": "has no attribute 'selective_scan_fwd'",
    "Jamba v0.1": "has no attribute 'selective_scan_fwd'",
    "Mamba 130M": "has no attribute 'selective_scan_fwd'",
    "Qwen 3 Next": "CPU GDN attention requires BF16",
}

#: Models with images: these folders have no image processor.
ALSO_SEE = ("Gemma 3 4B", "LLaVA 1.5", "Mistral Small 3.1", "Qwen 2 VL 2B")

#: Parts of the messages of models that are rejected, or without rows to compare.
REJECTED: dict[str, str] = {
    **LACKING,
    **ON_A_GPU,
    **dict.fromkeys(ALSO_SEE, "failed to be inspected"),
    "Mamba Codestral": "computes n_groups=2 of mamba2 differently from later versions",
    "Phi 3.5 MoE": "lm_head_bias=True of phimoe: vLLM takes False",
    "Phi 3 mini 128k": "'original_max_position_embeddings'",
    "Qwen 2 with windows": "have a window of 20 tokens, and vLLM's windows differ",
    "a Falcon with another width": "ffn_hidden_size=256 of falcon: vLLM takes 4 * hidden_size",
}

#: The same for types of weights in which other kernels run, or that a family may not have.
IN_A_TYPE = {
    ("Falcon Mamba 7B", "bfloat16"): "Dimension out of range",
    ("GLM 4 0414", "float16"): "does not support float16",
    ("Gemma 3 1B", "float16"): "does not support float16",
    ("Jamba v0.1", "bfloat16"): "Dimension out of range",
    ("Qwen 3 Next", "bfloat16"): "Unexpected head dim size, 32",
}


def loaded_in_its_length(folder: str, dtype: str) -> Any:
    """A model in vLLM, with contexts that are no longer than its configuration says."""
    settings = json.loads((Path(folder) / "config.json").read_text())
    longest = min(
        OPTIONS["max_model_len"], settings.get("max_position_embeddings", OPTIONS["max_model_len"])
    )
    return loaded(folder, dtype, {**OPTIONS, "max_model_len": longest})


class TestPublishedModels(EveryPublishedModel):
    """With transformers 5.19 and vLLM 0.32."""

    load: Any = loaded_in_its_length
    rejected = REJECTED
    rejected_types = IN_A_TYPE
