"""Shapes of tiny models, and the device that they are on."""

from __future__ import annotations

import os

import torch
from transformers import Lfm2Config, MambaConfig

#: The device of the tests' models. CONTRIBUTING.md says when to set another one.
DEVICE = torch.device(os.environ.get("GENLM_TEST_DEVICE", "cpu"))

TOKENS = 257  # every byte, and the end

SHAPE = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 256,
    "pad_token_id": 256,
}

#: Keys and values computed from a latent, and experts.
LATENT = {
    **SHAPE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}

#: Experts, and linear attention, which other families of experts do not look at.
QWEN3_NEXT = {
    **SHAPE,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

#: Experts, and a layer without rotary embeddings.
LLAMA4 = {
    **SHAPE,
    "head_dim": 8,
    "num_local_experts": 2,
    "intermediate_size_mlp": 48,
    "no_rope_layers": [1, 0],
}

#: A recurrent model, and a hybrid, whose state cannot be truncated.
MAMBA = MambaConfig(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4)
LFM2 = Lfm2Config(**SHAPE, layer_types=["conv", "full_attention"])

#: The bytes of one context: two layers with 4 columns of a convolution and 4 of a recurrence, for
#: 64 channels of float32.
MAMBA_BYTES = 2 * 64 * (4 + 4) * 4
