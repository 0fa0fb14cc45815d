"""The configurations of published models as their folders have them, scaled down: with old names of
settings, settings of other versions and of models' own code, and without what folders leave out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]

#: The length of windows and of the contexts for which models were first trained, in tokens.
NEAR = 20
TRAINED = 32

#: The sizes of all models: heads of 32 are the smallest for which vLLM has kernels on a CPU.
SIZES: Config = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_hidden_layers": 2,
    "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FEW: Config = {**SIZES, "num_key_value_heads": 2}
ALL: Config = {**SIZES, "num_key_value_heads": 4}

#: Sizes under the names of GPT-2, and of models that give few names of their own.
GPT2: Config = {
    "n_embd": 128, "n_head": 4, "n_layer": 2, "vocab_size": 96, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

V4: Config = {"torch_dtype": "bfloat16", "use_cache": True, "transformers_version": "4.40.1"}
LLAMA3_ROPE: Config = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3",
    "original_max_position_embeddings": TRAINED,
}  # fmt: skip
LONG: Config = {
    "short_factor": [1.0 + 0.02 * at for at in range(16)],
    "long_factor": [1.1 + 0.3 * at for at in range(16)],
}


def own_code(module: str, family: str) -> dict[str, dict[str, str]]:
    """The code of its own that a folder names."""
    return {
        "auto_map": {
            "AutoConfig": f"configuration_{module}.{family}Config",
            "AutoModelForCausalLM": f"modeling_{module}.{family}ForCausalLM",
        }
    }


def llama(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": False,
        "attention_dropout": 0.0, "hidden_act": "silu", "initializer_range": 0.02,
        "max_position_embeddings": 2048, "mlp_bias": False, "pretraining_tp": 1,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": False, **V4, **FEW, **settings,
    }  # fmt: skip


def mistral(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "sliding_window": NEAR, "tie_word_embeddings": False, **V4, **FEW, **settings,
    }  # fmt: skip


def qwen2(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "attention_dropout": 0.0,
        "hidden_act": "silu", "max_position_embeddings": 2048, "max_window_layers": 1,
        "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "sliding_window": NEAR,
        "tie_word_embeddings": False, "use_sliding_window": False, **V4, **FEW, **settings,
    }  # fmt: skip


def qwen3(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
        "head_dim": 32, "hidden_act": "silu", "max_position_embeddings": 2048,
        "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "use_sliding_window": False,
        **V4, **FEW, **settings,
    }  # fmt: skip


def gemma(kind: str, family: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": family, "attention_bias": False,
        "head_dim": 32, "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        **V4, **FEW, "pad_token_id": 0, **settings,
    }  # fmt: skip


GEMMA2: Config = {
    "attn_logit_softcapping": 5.0, "cache_implementation": "hybrid", "final_logit_softcapping": 3.0,
    "hidden_act": "gelu_pytorch_tanh", "query_pre_attn_scalar": 25, "sliding_window": NEAR,
    "sliding_window_size": NEAR,
}  # fmt: skip
GEMMA3: Config = {
    "attn_logit_softcapping": None, "cache_implementation": "hybrid",
    "final_logit_softcapping": None, "query_pre_attn_scalar": 25, "rope_local_base_freq": 100.0,
    "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": NEAR,
    "sliding_window_pattern": 2,
}  # fmt: skip


def phi3(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **own_code("phi3", "Phi3"),
        "attention_bias": False, "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "silu",
        "max_position_embeddings": 2048, "original_max_position_embeddings": 2048,
        "pad_token_id": 0, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": NEAR, "tie_word_embeddings": False, **V4, **ALL, **settings,
    }  # fmt: skip


def phi(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["PhiForCausalLM"], "model_type": "phi", "embd_pdrop": 0.0,
        "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5, "qk_layernorm": False, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, **V4, **ALL,
        "intermediate_size": 512, **settings,
    }  # fmt: skip


def falcon(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon",
        **own_code("falcon", "Falcon"), "alibi": False, "apply_residual_connection_post_layernorm":
        False, "bias": False, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5,
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
        **V4, **{name: each for name, each in SIZES.items() if name != "intermediate_size"},
        **settings,
    }  # fmt: skip


def bloom(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"], "model_type": "bloom",
        "apply_residual_connection_post_layernorm": False, "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True, "hidden_size": 128, "layer_norm_epsilon": 1e-5,
        "masked_softmax_fusion": True, "n_head": 4, "n_inner": None, "n_layer": 2,
        "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
        "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False,
        "unk_token_id": 0, "use_cache": True, "vocab_size": 96, "bos_token_id": 1,
        "eos_token_id": 2, "transformers_version": "4.20.0", **settings,
    }  # fmt: skip


def neox(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["GPTNeoXForCausalLM"], "model_type": "gpt_neox", "hidden_act": "gelu",
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "rotary_emb_base": 10000,
        "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True,
        "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True, **SIZES,
        "intermediate_size": 512, **settings,
    }  # fmt: skip


def opt(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "_remove_final_layer_norm": False,
        "activation_function": "relu", "do_layer_norm_before": True, "ffn_dim": 192,
        "hidden_size": 128, "init_std": 0.02, "layerdrop": 0.0, "max_position_embeddings": 2048,
        "num_attention_heads": 4, "num_hidden_layers": 2, "pad_token_id": 1, "prefix": "</s>",
        "torch_dtype": "float16", "vocab_size": 96, "word_embed_proj_dim": 128, "bos_token_id": 2,
        "eos_token_id": 2, "transformers_version": "4.21.0", **settings,
    }  # fmt: skip


def mpt(**attention: Any) -> dict[str, Any]:
    return {
        "architectures": ["MPTForCausalLM"], "model_type": "mpt",
        "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig",
                     "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
        "attn_config": {
            "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0,
            "attn_type": "multihead_attention", "attn_uses_sequence_id": False, "clip_qkv": None,
            "prefix_lm": False, "qk_ln": False, "softmax_scale": None, **attention},
        "d_model": 128, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4,
        "init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048,
        "n_heads": 4, "n_layers": 2, "no_bias": True, "norm_type": "low_precision_layernorm",
        "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
        "use_cache": False, "verbose": 0, "vocab_size": 96, "transformers_version": "4.28.1",
    }  # fmt: skip


def stablelm(**settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "hidden_act": "silu",
        "layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "partial_rotary_factor": 0.25,
        "rope_theta": 10000, "tie_word_embeddings": False, "use_qkv_bias": True, **V4, **ALL,
        **settings,
    }  # fmt: skip


def olmo(kind: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
        "max_position_embeddings": 2048, "pad_token_id": 1, "rope_scaling": None,
        "rope_theta": 10000.0, "tie_word_embeddings": False, **V4, **ALL, **settings,
    }  # fmt: skip


def granite(kind: str, family: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": family, "attention_bias": False,
        "attention_multiplier": 0.05, "embedding_multiplier": 3.0, "hidden_act": "silu",
        "logits_scaling": 2.0, "max_position_embeddings": 2048, "residual_multiplier": 0.3,
        "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 10000.0,
        "tie_word_embeddings": True, **V4, **FEW, **settings,
    }  # fmt: skip


def cohere(kind: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "attention_bias": False, "hidden_act": "silu", "layer_norm_eps": 1e-5,
        "logit_scale": 0.3, "max_position_embeddings": 2048, "model_max_length": 2048,
        "pad_token_id": 0, "rope_theta": 50000.0, **V4, **FEW, **settings,
    }  # fmt: skip


EXPERTS: Config = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def deepseek(kind: str, family: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": family,
        **own_code("deepseek", "Deepseek"), "attention_bias": False, "aux_loss_alpha": 0.001,
        "ep_size": 1, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 32,
        "max_position_embeddings": 2048, "moe_layer_freq": 1, "n_group": 2, "n_routed_experts": 4,
        "n_shared_experts": 1, "norm_topk_prob": False, "pretraining_tp": 1, "q_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 4, "mscale": 0.7, "mscale_all_dim": 0.7,
            "original_max_position_embeddings": TRAINED, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1,
        "topk_method": "group_limited_greedy", "v_head_dim": 32, **V4, **ALL, **EXPERTS, **settings,
    }  # fmt: skip


def glm(kind: str, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": [f"{kind}ForCausalLM"], "model_type": kind.lower(),
        "attention_bias": True, "attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu",
        "max_position_embeddings": 2048, "pad_token_id": 0, "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False, **V4, **FEW,
        "eos_token_id": [2, 3, 4], **settings,
    }  # fmt: skip


MAMBA: Config = {
    "bos_token_id": 0, "conv_kernel": 4, "eos_token_id": 0, "expand": 2, "hidden_act": "silu",
    "hidden_size": 128, "layer_norm_epsilon": 1e-5, "num_hidden_layers": 2, "pad_token_id": 0,
    "rescale_prenorm_residual": False, "residual_in_fp32": True, "state_size": 16,
    "torch_dtype": "float32", "use_bias": False, "use_cache": True, "use_conv_bias": True,
    "vocab_size": 96, "transformers_version": "4.39.0.dev0",
}  # fmt: skip

#: The configurations by the names of the models.
CONFIGS: Mapping[str, Config] = {
    # Llama, and models of its classes
    "Llama 1": llama(max_position_embeddings=(), num_key_value_heads=(), rope_theta=(),
                     rope_scaling=(), attention_bias=(), mlp_bias=(), pretraining_tp=(),
                     max_sequence_length=2048, pad_token_id=-1, bos_token_id=0, eos_token_id=1,
                     rms_norm_eps=1e-6, torch_dtype="float16", transformers_version="4.27.0.dev0"),
    "Llama 2 7B": llama(**ALL, rope_theta=(), attention_bias=(), mlp_bias=(),
                        torch_dtype="float16", transformers_version="4.31.0.dev0"),
    "Llama 3 8B": llama(rope_theta=500000.0, eos_token_id=2),
    "Llama 3.1 8B Instruct": llama(
        rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, eos_token_id=[2, 3, 4],
        max_position_embeddings=256),
    "Llama 3.2 1B": llama(
        rope_theta=500000.0, rope_scaling={**LLAMA3_ROPE, "factor": 32.0}, head_dim=32,
        tie_word_embeddings=True, max_position_embeddings=1024),
    "TinyLlama 1.1B": llama(),
    "CodeLlama 7B": llama(**ALL, rope_theta=1000000, torch_dtype="bfloat16"),
    "LongChat 7B": llama(**ALL, rope_theta=(), rope_scaling={"factor": 8.0, "type": "linear"}),
    "Llama 2 with dynamic NTK": llama(
        **ALL, rope_theta=(), max_position_embeddings=TRAINED,
        rope_scaling={"factor": 2.0, "type": "dynamic"}),
    "Yarn Llama 2": llama(
        **ALL, **own_code("llama", "Llama"), max_position_embeddings=8 * TRAINED,
        rope_scaling={"factor": 8.0, "finetuned": True, "type": "yarn",
                      "original_max_position_embeddings": TRAINED}),
    "DeepSeek Coder 6.7B": llama(**ALL, rope_theta=100000,
                                 rope_scaling={"factor": 4.0, "type": "linear"}),
    "Yi 34B": llama(rope_theta=5000000.0, pad_token_id=0),
    "SmolLM2 135M": llama(
        rope_theta=100000, tie_word_embeddings=True, is_llama_config=True, rope_interleaved=False,
        pad_token_id=2),
    "Falcon 3": llama(head_dim=32, rope_theta=1000042, activation="swiglu"),
    "EuroLLM": llama(head_dim=32),
    "a Llama with biases": llama(attention_bias=True, mlp_bias=True),
    # Mistral
    "Mistral 7B v0.1": mistral(transformers_version="4.34.0.dev0"),
    "Mistral 7B v0.3": mistral(sliding_window=None, rope_theta=1000000.0),
    "Mistral Nemo": mistral(head_dim=64, sliding_window=None, rope_theta=1000000.0),
    "Mistral Small 24B": mistral(head_dim=64, sliding_window=None, rope_theta=100000000.0),
    "Ministral 8B": mistral(head_dim=32, rope_theta=100000000.0, sliding_window=NEAR),
    "Yarn Mistral": mistral(
        **own_code("mistral", "Mistral"), sliding_window=2048, max_position_embeddings=256,
        max_sequence_length=256,
        rope_scaling={"factor": 8.0, "finetuned": True, "type": "yarn",
                      "original_max_position_embeddings": TRAINED}),
    "Mixtral 8x7B": {
        **mistral(sliding_window=None, rope_theta=1000000.0), "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2, "num_local_experts": 4,
        "output_router_logits": False, "router_aux_loss_coef": 0.02},
    # Qwen
    "Qwen 1.5": qwen2(num_key_value_heads=4),
    "Qwen 2 0.5B": qwen2(tie_word_embeddings=True),
    "Qwen 2.5 7B": qwen2(),
    "Qwen 2.5 with YaRN": qwen2(
        max_position_embeddings=TRAINED,
        rope_scaling={"factor": 4.0, "original_max_position_embeddings": TRAINED, "type": "yarn"}),
    "Qwen 2 with windows": qwen2(use_sliding_window=True),
    "Qwen 2 57B A14B": qwen2(
        architectures=["Qwen2MoeForCausalLM"], model_type="qwen2_moe", decoder_sparse_step=1,
        **EXPERTS, norm_topk_prob=False, num_experts=4, output_router_logits=False,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=128),
    "Qwen 3 0.6B": qwen3(),
    "Qwen 3 with YaRN": qwen3(
        max_position_embeddings=TRAINED, tie_word_embeddings=False,
        rope_scaling={"rope_type": "yarn", "factor": 4.0,
                      "original_max_position_embeddings": TRAINED}),
    "Qwen 3 30B A3B": qwen3(
        architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", decoder_sparse_step=1,
        **EXPERTS, mlp_only_layers=[], norm_topk_prob=True, num_experts=4,
        output_router_logits=False, router_aux_loss_coef=0.001, tie_word_embeddings=False),
    "Qwen 3 Next": qwen3(
        architectures=["Qwen3NextForCausalLM"], model_type="qwen3_next", decoder_sparse_step=1,
        **EXPERTS, mlp_only_layers=[], norm_topk_prob=True, num_experts=4,
        shared_expert_intermediate_size=64, full_attention_interval=2, linear_conv_kernel_dim=4,
        linear_key_head_dim=32, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_value_head_dim=32, partial_rotary_factor=0.25, tie_word_embeddings=False),
    # Gemma
    "Gemma 2B": gemma("Gemma", "gemma", hidden_act="gelu", hidden_activation=None,
                      num_key_value_heads=1),
    "Gemma 7B": gemma("Gemma", "gemma", hidden_act="gelu", hidden_activation=(),
                      num_key_value_heads=4),
    "Gemma 2 2B": gemma("Gemma2", "gemma2", **GEMMA2),
    "Gemma 3 1B": gemma("Gemma3", "gemma3_text", **GEMMA3),
    "Gemma 3 270M": gemma("Gemma3", "gemma3_text", **{
        **GEMMA3, "_sliding_window_pattern": 2, "sliding_window_pattern": (),
        "layer_types": ["sliding_attention", "full_attention"],
        "use_bidirectional_attention": False}),
    "Gemma 3 4B": {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "boi_token_index": 91, "eoi_token_index": 92, "image_token_index": 93,
        "eos_token_id": [1, 3], "mm_tokens_per_image": 4, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "vocab_size": 96,
        "text_config": {
            "hidden_size": 128, "intermediate_size": 192, "model_type": "gemma3_text",
            "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
            "head_dim": 32, "vocab_size": 96, "sliding_window": NEAR,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window_pattern": 2},
        "vision_config": {
            "hidden_size": 64, "image_size": 28, "intermediate_size": 64,
            "model_type": "siglip_vision_model", "num_attention_heads": 2, "num_hidden_layers": 1,
            "patch_size": 14, "vision_use_head": False}},
    "VaultGemma 1B": gemma("VaultGemma", "vaultgemma", **GEMMA2,
                           layer_types=["sliding_attention", "full_attention"]),
    "RecurrentGemma 2B": gemma(
        "RecurrentGemma", "recurrent_gemma", attention_window_size=NEAR, attention_probs_dropout=0,
        attention_dropout=0.0, block_types=["recurrent", "attention"], conv1d_width=4,
        embeddings_scale_by_sqrt_dim=True, final_w_init_variance_scale=0.25, lru_width=128,
        logits_soft_cap=3.0, num_key_value_heads=1, partial_rotary_factor=0.5,
        w_init_variance_scale=0.01, intermediate_size=384, hidden_activation="gelu_pytorch_tanh"),
    # Phi
    "Phi 1.5": phi(),
    "Phi 2": phi(partial_rotary_factor=0.25, torch_dtype="float16"),
    "Phi 3 mini 4k": phi3(),
    "Phi 3 mini 128k": phi3(
        max_position_embeddings=4 * TRAINED, original_max_position_embeddings=TRAINED,
        sliding_window=2048, rope_scaling={**LONG, "type": "su"}),
    "Phi 3.5 mini": phi3(
        max_position_embeddings=4 * TRAINED, original_max_position_embeddings=TRAINED,
        sliding_window=2048, rope_scaling={**LONG, "type": "longrope"}),
    "Phi 3 medium 4k": phi3(num_key_value_heads=2),
    "Phi 4": phi3(
        auto_map=(), num_key_value_heads=2, rope_theta=250000, sliding_window=None, bos_token_id=3,
        eos_token_id=3, pad_token_id=3),
    "Phi 4 mini": phi3(
        max_position_embeddings=4 * TRAINED, original_max_position_embeddings=TRAINED,
        sliding_window=2048, partial_rotary_factor=0.75, tie_word_embeddings=True,
        num_key_value_heads=2, interpolate_factor=1, full_attn_mod=1, lm_head_bias=False,
        mlp_bias=False, rope_scaling={
            "short_factor": [1.0] * 12, "long_factor": [1.1 + 0.3 * at for at in range(12)],
            "type": "longrope"}),
    "Phi 3.5 MoE": {
        "architectures": ["PhiMoEForCausalLM"], "model_type": "phimoe",
        **own_code("phimoe", "PhiMoE"), "attention_bias": True, "hidden_act": "silu",
        "hidden_dropout": 0.0, "input_jitter_noise": 0.01, "lm_head_bias": True,
        "max_position_embeddings": 4 * TRAINED, "num_experts_per_tok": 2, "num_local_experts": 4,
        "original_max_position_embeddings": TRAINED, "output_router_logits": False,
        "rms_norm_eps": 1e-5, "rope_scaling": {
            **LONG, "long_mscale": 1.2, "short_mscale": 1.2, "type": "longrope",
            "original_max_position_embeddings": TRAINED},
        "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
        "sliding_window": 2048, "tie_word_embeddings": False, **V4, **FEW},
    # Falcon
    "Falcon 7B": falcon(),
    "Falcon 40B": falcon(new_decoder_architecture=True, num_kv_heads=2),
    "Falcon RW 1B": falcon(alibi=True, bias=True, multi_query=False, parallel_attn=False),
    "Falcon 2 11B": falcon(
        new_decoder_architecture=True, num_kv_heads=2, num_ln_in_parallel_attn=1,
        ff_factor=4, ffn_hidden_size=512, max_position_embeddings=2048, rope_theta=500042.0),
    "a Falcon with another width": falcon(ffn_hidden_size=256),
    "Falcon 7B of 2023": falcon(
        architectures=["RWForCausalLM"], model_type="RefinedWebModel", n_head=4, n_layer=2,
        num_attention_heads=(), num_hidden_layers=()),
    # Older families
    "BLOOM 560M": bloom(),
    "BLOOMZ": bloom(n_embed=128, num_attention_heads=4, hidden_size=()),
    "GPT-2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2",
        "activation_function": "gelu_new", "attn_pdrop": 0.1, "embd_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "n_ctx": 1024, "n_positions": 1024, "resid_pdrop": 0.1,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
        **GPT2},
    "DistilGPT-2": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "_num_labels": 1,
        "activation_function": "gelu_new", "n_ctx": 1024, "n_positions": 1024,
        "layer_norm_epsilon": 1e-5, **GPT2},
    "Cerebras GPT": {
        "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu",
        "n_inner": 512, "n_positions": 1024, "scale_attn_weights": True, **GPT2},
    "GPT-J 6B": {
        "architectures": ["GPTJForCausalLM"], "model_type": "gptj",
        "activation_function": "gelu_new", "gradient_checkpointing": False, "n_inner": None,
        "n_positions": 1024, "layer_norm_epsilon": 1e-5, "rotary": True, "rotary_dim": 16,
        "scale_attn_weights": True, "tie_word_embeddings": False,
        "tokenizer_class": "GPT2Tokenizer", **GPT2},
    "CodeGen 350M": {
        "architectures": ["CodeGenForCausalLM"], "model_type": "codegen",
        "activation_function": "gelu_new", "n_ctx": 1024, "n_inner": None, "n_positions": 1024,
        "rotary_dim": 16, "tie_word_embeddings": False, "torch_dtype": "float16", **GPT2},
    "GPT-Neo 125M": {
        "architectures": ["GPTNeoForCausalLM"], "model_type": "gpt_neo",
        "activation_function": "gelu_new", "attention_layers": ["global", "local"],
        "attention_types": [[["global", "local"], 1]], "hidden_size": 128,
        "intermediate_size": None, "max_position_embeddings": 1024, "num_heads": 4,
        "num_layers": 2, "window_size": NEAR, "vocab_size": 96, "bos_token_id": 1,
        "eos_token_id": 2},
    "GPT-NeoX 20B": neox(hidden_act="gelu_fast", attention_probs_dropout_prob=0),
    "Pythia 70M": neox(),
    "RedPajama 3B": neox(rotary_pct=1.0, use_parallel_residual=False),
    "OPT 125M": opt(),
    "OPT 350M": opt(do_layer_norm_before=False, word_embed_proj_dim=64),
    "Galactica": opt(activation_function="gelu", enable_bias=True, prefix=None,
                     layer_norm_elementwise_affine=True, learned_embeddings=True, bos_token_id=0),
    "MPT 7B": mpt(),
    "MPT 7B StoryWriter": mpt(alibi_bias_max=16, clip_qkv=1.0),
    "GPT BigCode": {
        "architectures": ["GPTBigCodeForCausalLM"], "model_type": "gpt_bigcode",
        "activation_function": "gelu_pytorch_tanh", "attention_softmax_in_fp32": True,
        "inference_runner": 0, "max_batch_size": None, "max_sequence_length": None,
        "multi_query": True, "n_inner": 512, "n_positions": 1024, "pad_key_length": True,
        "pre_allocate_kv_cache": False, "scale_attention_softmax_in_fp32": True,
        "scale_attn_weights": True, "validate_runner_input": True, **GPT2},
    "StarCoder 2 3B": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2",
        "attention_dropout": 0.1, "embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 2048, "mlp_type": "default", "norm_epsilon": 1e-5,
        "norm_type": "layer_norm", "rope_theta": 999999.4420358813, "sliding_window": NEAR,
        "use_bias": True, **V4, **FEW},
    "StableLM 3B": stablelm(use_qkv_bias=False, rotary_scaling_factor=1.0),
    "StableLM 2 1.6B": stablelm(),
    "StableLM 2 12B": stablelm(
        num_key_value_heads=2, qk_layernorm=True, use_parallel_residual=True, use_qkv_bias=False),
    "Persimmon 8B": {
        "architectures": ["PersimmonForCausalLM"], "model_type": "persimmon",
        "hidden_act": "relu2", "layer_norm_eps": 1e-5, "max_position_embeddings": 2048,
        "partial_rotary_factor": 0.5, "qk_layernorm": True, "rope_scaling": None,
        "rope_theta": 25000.0, "tie_word_embeddings": False, **V4, **SIZES},
    "XGLM 564M": {
        "architectures": ["XGLMForCausalLM"], "model_type": "xglm", "activation_function": "gelu",
        "attention_heads": 4, "d_model": 128, "ffn_dim": 192, "max_position_embeddings": 1024,
        "num_layers": 2, "scale_embedding": True, "vocab_size": 96, "bos_token_id": 0,
        "eos_token_id": 2, "pad_token_id": 1, "decoder_start_token_id": 2},
    # OLMo, Granite, Cohere
    "OLMo 1B": olmo("Olmo", clip_qkv=None, tie_word_embeddings=True),
    "OLMo 7B": olmo("Olmo", clip_qkv=1.0),
    "OLMo 2 7B": olmo("Olmo2", rms_norm_eps=1e-6, rope_theta=500000),
    "OLMo 3 7B": olmo(
        "Olmo3", rms_norm_eps=1e-6, rope_theta=500000, sliding_window=NEAR,
        max_position_embeddings=256, layer_types=["sliding_attention", "full_attention"],
        rope_scaling={
            "attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0,
            "factor": 8.0, "original_max_position_embeddings": TRAINED, "rope_type": "yarn"}),
    "OLMoE 1B 7B": olmo(
        "Olmoe", clip_qkv=None, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False,
        output_router_logits=False, rms_norm_eps=1e-5, router_aux_loss_coef=0.01),
    "Granite 3 2B": granite("Granite", "granite"),
    "Granite 3 MoE": granite("GraniteMoe", "granitemoe", num_local_experts=4,
                             num_experts_per_tok=2, output_router_logits=False),
    "Granite 4 hybrid": granite(
        "GraniteMoeHybrid", "granitemoehybrid", layer_types=["mamba", "attention"],
        mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=32,
        mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=8,
        mamba_proj_bias=False, normalization_function="rmsnorm", num_experts_per_tok=2,
        num_local_experts=4, output_router_logits=False, position_embedding_type="nope",
        init_method="mup", shared_intermediate_size=128),
    "Command R": cohere("Cohere", num_key_value_heads=4, use_qk_norm=False),
    "Command R+": cohere("Cohere", use_qk_norm=True),
    "Command R7B": cohere(
        "Cohere2", _attn_implementation_autoset=True, cache_implementation="hybrid", head_dim=32,
        layer_switch=2, order_of_interleaved_layers="local_attn_first",
        position_embedding_type="rope_gptj", rope_scaling=None, rotary_pct=1.0,
        sliding_window=NEAR, sliding_window_pattern=2, use_embedding_sharing=True,
        use_gated_activation=True, use_parallel_block=True, use_parallel_embedding=True),
    # Latent attention and experts
    "DeepSeek V2 Lite": deepseek("DeepseekV2", "deepseek_v2", q_lora_rank=None, n_group=1,
                                 topk_method="greedy"),
    "DeepSeek V2": deepseek("DeepseekV2", "deepseek_v2", routed_scaling_factor=16.0),
    "DeepSeek V3 in bfloat16": deepseek(
        "DeepseekV3", "deepseek_v3", norm_topk_prob=True, routed_scaling_factor=2.5,
        scoring_func="sigmoid", topk_method="noaux_tc", num_nextn_predict_layers=1),
    "DeepSeek MoE 16B": deepseek("Deepseek", "deepseek"),
    "gpt-oss in bfloat16": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": True,
        "attention_dropout": 0.0, "experts_per_token": 2, "head_dim": 32, "hidden_act": "silu",
        "initial_context_length": TRAINED, "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "full_attention"], "num_experts_per_tok": 2,
        "num_local_experts": 4, "output_router_logits": False, "rms_norm_eps": 1e-5,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": TRAINED, "rope_type": "yarn",
                         "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": NEAR,
        "swiglu_limit": 7.0, "tie_word_embeddings": False, **V4, **FEW},
    "GLM 4 9B chat": glm("Glm", num_attention_heads=4, partial_rotary_factor=0.5),
    "GLM 4 0414": glm("Glm4", attention_bias=False),
    "GLM 4.5 Air": {
        **glm("Glm4", num_nextn_predict_layers=1), "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe", "first_k_dense_replace": 1, **EXPERTS, "n_group": 1,
        "n_routed_experts": 4, "n_shared_experts": 1, "norm_topk_prob": True,
        "rope_scaling": None, "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False},
    "EXAONE 4 32B": {
        "architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4", "head_dim": 32,
        "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 256,
        "layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0,
        "rms_norm_eps": 1e-5, "rope_scaling": LLAMA3_ROPE, "rope_theta": 1000000,
        "sliding_window": NEAR, "sliding_window_pattern": "LG", "tie_word_embeddings": False,
        **V4, **FEW},
    "EXAONE 3.5": {
        "architectures": ["ExaoneForCausalLM"], "model_type": "exaone",
        **own_code("exaone", "Exaone"), "activation_function": "silu", "attention_dropout": 0.0,
        "embed_dropout": 0.0, "head_dim": 32, "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 256, "num_layers": 2, "pad_token_id": 0,
        "rope_scaling": LLAMA3_ROPE, "rope_theta": 1000000, "tie_word_embeddings": False, **V4,
        **{name: each for name, each in FEW.items() if name != "num_hidden_layers"}},
    "Minitron 4B": {
        "architectures": ["NemotronForCausalLM"], "model_type": "nemotron",
        "attention_bias": False, "attention_dropout": 0.0, "head_dim": 32, "hidden_act": "relu2",
        "hidden_dropout": 0.0, "max_position_embeddings": 2048, "mlp_bias": False,
        "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, **V4, **FEW},
    "SmolLM3 3B": {
        **llama(), "architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3",
        "layer_types": ["full_attention"] * 2, "max_window_layers": 28, "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0], "rope_theta": 5000000.0, "sliding_window": None,
        "tie_word_embeddings": (), "use_sliding_window": False, "pad_token_id": 0},
    "Apertus 8B": {
        **llama(), "architectures": ["ApertusForCausalLM"], "model_type": "apertus",
        "hidden_act": "xielu", "max_position_embeddings": 256, "post_norm": False, "qk_norm": True,
        "rope_scaling": LLAMA3_ROPE, "rope_theta": 12000000},
    "ERNIE 4.5 0.3B": {
        **llama(), "architectures": ["Ernie4_5_ForCausalLM"], "model_type": "ernie4_5",
        "compression_ratio": 1.0, "head_dim": 32, "tie_word_embeddings": True, "use_bias": False,
        "rope_theta": 500000, "pad_token_id": 0},
    "Hunyuan 0.5B": {
        **llama(), "architectures": ["HunYuanDenseV1ForCausalLM"],
        "model_type": "hunyuan_v1_dense", "head_dim": 32, "use_qk_norm": True, "use_cla": False,
        "cla_share_factor": 2, "max_position_embeddings": TRAINED, "tie_word_embeddings": True,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "type": "dynamic"}},
    "Seed OSS 36B": {
        **llama(), "architectures": ["SeedOssForCausalLM"], "model_type": "seed_oss",
        "attention_bias": True, "attention_out_bias": False, "head_dim": 32, "residual_dropout": 0,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0},
    # States
    "Mamba 130M": {
        **MAMBA, "architectures": ["MambaForCausalLM"], "model_type": "mamba", "d_inner": 256,
        "d_model": 128, "fused_add_norm": True, "initializer_range": 0.1, "intermediate_size": 256,
        "n_layer": 2, "pad_vocab_size_multiple": 8, "rms_norm": True, "ssm_cfg": {},
        "time_step_rank": 8, "time_step_scale": 1.0},
    "Mamba Codestral": {
        **MAMBA, "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "chunk_size": 256,
        "head_dim": 32, "intermediate_size": 256, "n_groups": 2, "norm_before_gate": True,
        "num_heads": 8, "rms_norm": True,
        "time_step_limit": [0.0, float("inf")], "time_step_rank": 8, "tie_word_embeddings": False},
    "Falcon Mamba 7B": {
        **MAMBA, "architectures": ["FalconMambaForCausalLM"], "model_type": "falcon_mamba",
        "expand": 16, "intermediate_size": 256, "mixer_rms_eps": 1e-6, "time_step_rank": 8,
        "tie_word_embeddings": False},
    "Falcon H1 0.5B": {
        **llama(), "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.9,
        "attn_layer_indices": None, "embedding_multiplier": 5.0, "head_dim": 32,
        "key_multiplier": 0.4, "lm_head_multiplier": 0.2, "mamba_chunk_size": 128,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_ssm": 256,
        "mamba_d_state": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8,
        "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "mamba_use_mlp": True, "mlp_expansion_factor": 8, "mlp_multipliers": [0.9, 0.6],
        "projectors_bias": False, "ssm_in_multiplier": 1.3, "ssm_multipliers":
        [0.3, 0.25, 0.35, 0.5, 0.6], "ssm_out_multiplier": 0.7, "time_step_floor": 0.0001,
        "time_step_max": 0.1, "time_step_min": 0.001, "num_logits_to_keep": 1},
    "LFM2 350M": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim":
        True, "block_dim": 128, "block_ff_dim": 192, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 32, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True,
        "conv_L_cache": 3, "conv_bias": False, "conv_dim": 128, "conv_dim_out": 128,
        "conv_use_xavier_init": True, "full_attn_idxs": [1], "max_position_embeddings": 2048,
        "norm_eps": 1e-5, "num_heads": 4, "pad_token_id": 0, "rope_theta": 1000000.0,
        "use_pos_enc": True, **V4, **FEW},
    "LFM2 8B A1B": {
        "architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "conv_L_cache": 3,
        "conv_bias": False, "layer_types": ["conv", "full_attention"],
        "max_position_embeddings": 2048, "moe_intermediate_size": 64, "norm_eps": 1e-5,
        "norm_topk_prob": True, "num_dense_layers": 1, "num_experts": 4, "num_experts_per_tok": 2,
        "pad_token_id": 0, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0,
        "use_expert_bias": True, **V4, **FEW},
    "Jamba v0.1": {
        "architectures": ["JambaForCausalLM"], "model_type": "jamba",
        **own_code("jamba", "Jamba"), "attention_dropout": 0.0, "attn_layer_offset": 1,
        "attn_layer_period": 2, "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "mamba_conv_bias": True,
        "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 8, "mamba_expand": 2,
        "mamba_inner_layernorms": True, "mamba_proj_bias": False, "n_ctx": 2048,
        "num_experts": 4, "num_experts_per_tok": 2, "num_logits_to_keep": 1,
        "output_router_logits": False, "rms_norm_eps": 1e-6, "sliding_window": None,
        "tie_word_embeddings": False, "use_mamba_kernels": False, "pad_token_id": 0, **V4, **FEW},
    "Bamba 9B": {
        "architectures": ["BambaForCausalLM"], "model_type": "bamba", "attn_layer_indices": [1],
        "attn_rotary_emb": 16, "hidden_act": "silu", "mamba_chunk_size": 256,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 32, "mamba_d_state": 16,
        "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 8, "mamba_proj_bias": False,
        "max_position_embeddings": 2048, "num_logits_to_keep": 1, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "pad_token_id": 0, **V4, **FEW},
    "Zamba 2 1.2B": {
        "architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "add_bias_linear": False,
        "attention_head_dim": 64, "attention_hidden_size": 256, "chunk_size": 256,
        "ffn_hidden_size": 256, "hidden_size": 128, "hybrid_layer_ids": [1], "kv_channels": 32,
        "layers_block_type": ["mamba", "hybrid"], "mamba_d_conv": 4, "mamba_d_state": 16,
        "mamba_expand": 2, "mamba_headdim": 32, "mamba_ngroups": 1, "max_position_embeddings": 2048,
        "n_mamba_heads": 8, "num_attention_heads": 4, "num_hidden_layers": 2,
        "num_key_value_heads": 4, "num_logits_to_keep": 1, "num_mem_blocks": 1,
        "num_query_groups": 4, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10000,
        "use_conv_bias": True, "use_mem_rope": True, "use_shared_attention_adapter": False,
        "use_shared_mlp_adapter": True, "adapter_rank": 16, "vocab_size": 96, **V4},
    # Models that also see
    "LLaVA 1.5": {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "ignore_index": -100, "image_token_index": 95, "pad_token_id": 0,
        "projector_hidden_act": "gelu", "text_config": {
            "_name_or_path": "lmsys/vicuna-7b-v1.5", "architectures": ["LlamaForCausalLM"],
            "max_position_embeddings": 2048, "model_type": "llama", "rms_norm_eps": 1e-5,
            "torch_dtype": "float16", **ALL},
        "torch_dtype": "float16", "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default", "vision_config": {
            "hidden_size": 64, "image_size": 28, "intermediate_size": 64,
            "model_type": "clip_vision_model", "num_attention_heads": 2, "num_hidden_layers": 2,
            "patch_size": 14, "projection_dim": 64, "vocab_size": 96},
        "vocab_size": 96, "transformers_version": "4.36.0.dev0"},
    "Mistral Small 3.1": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
        "image_token_index": 90, "multimodal_projector_bias": False, "tie_word_embeddings": False,
        "projector_hidden_act": "gelu", "spatial_merge_size": 2, "text_config": {
            "attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu",
            "max_position_embeddings": 2048, "model_type": "mistral", "rms_norm_eps": 1e-5,
            "rope_theta": 1000000000.0, "sliding_window": None, **FEW},
        "torch_dtype": "bfloat16", "vision_config": {
            "attention_dropout": 0.0, "head_dim": 32, "hidden_act": "silu", "hidden_size": 64,
            "image_size": 28, "intermediate_size": 64, "model_type": "pixtral",
            "num_attention_heads": 2, "num_channels": 3, "num_hidden_layers": 1, "patch_size": 14,
            "rope_theta": 10000.0},
        "vision_feature_layer": -1},
    "Qwen 2 VL 2B": {
        **qwen2(architectures=["Qwen2VLForConditionalGeneration"], model_type="qwen2_vl",
                tie_word_embeddings=True,
                rope_scaling={"type": "mrope", "mrope_section": [4, 6, 6]}),
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92,
        "vision_end_token_id": 93, "vision_token_id": 94, "vision_config": {
            "depth": 1, "embed_dim": 64, "mlp_ratio": 2, "num_heads": 2, "in_chans": 3,
            "hidden_size": 128, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "temporal_patch_size": 2}},
}  # fmt: skip
