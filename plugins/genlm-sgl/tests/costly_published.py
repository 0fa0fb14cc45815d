"""Folders of published models in SGLang. These tests are collected only if the file is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.published_models import EveryPublishedModel

from .costly_verify import loaded

#: Families that SGLang does not have, and runs with transformers' code only if that uses its
#: attention.
LACKING = (
    "BLOOM 560M", "BLOOMZ", "Bamba 9B", "CodeGen 350M", "Falcon 2 11B", "Falcon 40B", "Falcon 7B",
    "Falcon Mamba 7B", "Falcon RW 1B", "GPT-Neo 125M", "Jamba v0.1", "Mamba 130M", "XGLM 564M",
    "Zamba 2 1.2B", "a Falcon with another width",
)  # fmt: skip

#: Families whose kernels need a GPU.
ON_A_GPU = {
    "DeepSeek V2": "no latent attention for deepseek_v2 in plain PyTorch",
    "DeepSeek V2 Lite": "no latent attention for deepseek_v2 in plain PyTorch",
    "DeepSeek V3 in bfloat16": "no latent attention for deepseek_v3 in plain PyTorch",
    "EXAONE 4 32B": "One of the attention backends",
    "Falcon H1 0.5B": "name 'causal_conv1d_fn' is not defined",
    "Granite 4 hybrid": "name 'causal_conv1d_fn_triton' is not defined",
    "LFM2 350M": "0 active drivers",
    "LFM2 8B A1B": "0 active drivers",
    "Qwen 2 57B A14B": "0 active drivers",
    "Qwen 3 Next": "0 active drivers",
    "gpt-oss in bfloat16": "GptOssForCausalLM requires one of",
}

#: Models with images: these folders have no image processor.
ALSO_SEE = ("LLaVA 1.5", "Mistral Small 3.1", "Qwen 2 VL 2B")

#: Parts of the messages of models that are rejected.
REJECTED: dict[str, str] = {
    **dict.fromkeys(LACKING, "has no SGlang implementation"),
    **ON_A_GPU,
    **dict.fromkeys(ALSO_SEE, "Can't load image processor"),
    "DeepSeek MoE 16B": "model type `deepseek` but Transformers does not",
    "EXAONE 3.5": "'model.embed_tokens.weight'",  # transformers 5.19 cannot write its weights
    "Falcon 7B of 2023": "model type `RefinedWebModel` but Transformers does not",
    "GLM 4 9B chat": "Unsupported TP style 'colwise_gather_output'",
    "GPT-J 6B": "lm_head.bias (1 weights in all), which transformers reads",
    "Gemma 3 4B": "'vision_tower.embeddings.patch_embedding.weight'",
    "Hunyuan 0.5B": "shape '[-1, 4, 32]' is invalid",
    "MPT 7B": "'MPTForCausalLM' is not a registered model",
    "MPT 7B StoryWriter": "'MPTForCausalLM' is not a registered model",
    "Mamba Codestral": "unsupported operand type(s) for %",
    "Minitron 4B": "'NoneType' object is not subscriptable",
    "Phi 1.5": "lm_head.bias (1 weights in all), which transformers reads",
    "Phi 2": "lm_head.bias (1 weights in all), which transformers reads",
    "Phi 3 mini 128k": "'original_max_position_embeddings'",
    "Phi 3.5 MoE": "lm_head.bias (1 weights in all), which transformers reads",
    "RecurrentGemma 2B": "recurrent_gemma keeps no state of them",
    "StableLM 2 12B": "k_layernorm.norms.0.weight",
    "a Llama with biases": "mlp.down_proj.bias (6 weights in all), which transformers reads",
}


def loaded_without_code(folder: str, dtype: str) -> Any:
    """A folder that names code of its own is rejected, which test_trust.py tests."""
    file = Path(folder) / "config.json"
    settings = json.loads(file.read_text())
    settings.pop("auto_map", None)
    file.write_text(json.dumps(settings))
    return loaded(folder, dtype)


class TestPublishedModels(EveryPublishedModel):
    """With transformers 5.19 and SGLang 0.5.23."""

    load: Any = loaded_without_code
    rejected = REJECTED
