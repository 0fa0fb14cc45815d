"""Folders of published models in mlx. These tests are collected only if the file is named."""

from __future__ import annotations

from typing import Any

from tests.published_models import EveryPublishedModel

from .costly_verify import loaded

#: mlx-lm reads no pickled weights, and lacks some families.
PICKLED = (
    "BLOOMZ", "CodeGen 350M", "Falcon 7B", "GPT-J 6B", "GPT-Neo 125M", "Llama 1", "OPT 125M",
    "OPT 350M",
)  # fmt: skip
LACKING = (
    "BLOOM 560M", "Bamba 9B", "Falcon 2 11B", "Falcon 40B", "Falcon 7B of 2023", "Falcon RW 1B",
    "Galactica", "MPT 7B", "MPT 7B StoryWriter", "Persimmon 8B", "VaultGemma 1B", "XGLM 564M",
    "Zamba 2 1.2B", "a Falcon with another width",
)  # fmt: skip

#: Parts of the messages of models that are rejected.
REJECTED: dict[str, str] = {
    **dict.fromkeys(PICKLED, "No safetensors found"),
    **dict.fromkeys(LACKING, "not supported"),
    "Cerebras GPT": "parameters not in model",
    "DeepSeek MoE 16B": "parameters not in model",
    "DistilGPT-2": "parameters not in model",
    "Jamba v0.1": "num_experts=4, which mlx-lm's jamba computes differently",
    "Mamba Codestral": "n_groups=2, which mlx-lm's mamba2 computes differently",
    "OLMo 1B": "family 'olmo' (SystemExit",  # it needs a library of its own
    "OLMo 7B": "family 'olmo' (SystemExit",
    "Phi 3 mini 128k": "'original_max_position_embeddings'",
    "gpt-oss in bfloat16": "parameters not in model",  # it reads OpenAI's own four bits
}


class TestPublishedModels(EveryPublishedModel):
    """With transformers 5.24 and mlx-lm 0.32.2."""

    load: Any = loaded
    rejected = REJECTED
