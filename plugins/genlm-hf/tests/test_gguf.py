"""A folder that has only a GGUF file in it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    Qwen2Config,
    Starcoder2Config,
)

from genlm.core import EngineError
from genlm.hf import AsyncTransformer

from .models import build

gguf = pytest.importorskip("gguf", reason="gguf is not installed")

WIDTH, HEADS, LAYERS, INNER = 32, 4, 2, 64


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random llama with a byte-level vocabulary, as llama.cpp writes it."""
    random = np.random.default_rng(0)
    tokens = [*sorted(ByteLevel.alphabet()), "ab", "<|end|>"]
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (len(tokens) - 1) + [3])
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(len(tokens) - 1)

    def add(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.standard_normal(shape).astype(np.float32) * 0.3)

    add("token_embd.weight", len(tokens), WIDTH)
    add("output.weight", len(tokens), WIDTH)
    add("output_norm.weight", WIDTH)
    for i in range(LAYERS):
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            add(f"blk.{i}.{part}.weight", WIDTH, WIDTH)
        add(f"blk.{i}.ffn_gate.weight", INNER, WIDTH)
        add(f"blk.{i}.ffn_up.weight", INNER, WIDTH)
        add(f"blk.{i}.ffn_down.weight", WIDTH, INNER)
        add(f"blk.{i}.attn_norm.weight", WIDTH)
        add(f"blk.{i}.ffn_norm.weight", WIDTH)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tmp_path


def test_folder_with_a_gguf_file_gives_the_rows_of_transformers(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
    with AsyncTransformer.from_name(str(folder)) as lm:
        ids = lm.tokenizer.encode("abc", add_special_tokens=False)
        assert b"".join(lm.byte_vocab[i].byte_string for i in ids) == b"abc"
        row = lm.next_token_logprobs_sync(ids)
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    # transformers adds a token of its own to the tokenizer, for which the model has no row.
    assert torch.allclose(row[: len(expected)], expected, atol=1e-4)
    assert (row[len(expected) :] == -float("inf")).all()


# --- what transformers passes over ----------------------------------------------------------------

TOKENS = [*sorted(ByteLevel.alphabet()), "ab", "<|end|>"]
SIZES = {
    "vocab_size": len(TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "bos_token_id": 257, "eos_token_id": 257, "pad_token_id": 257, "tie_word_embeddings": False,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
YARN = {**LINEAR, "rope_type": "yarn", "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 40,
    "long_factor": [4.0] * 8, "short_factor": [1.5] * 8, "attention_factor": 1.2,
    "partial_rotary_factor": 1.0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
GEMMA = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA_SIZES = {
    **SIZES, "tie_word_embeddings": True, "head_dim": 16, "sliding_window": 12,
    "query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 777.0}


def gemma2(layers: int, scale: int) -> tuple[str, Any, dict[str, Any]]:
    """As the two published sizes: the file does not say by how much queries are scaled."""
    config = Gemma2Config(
        **{**GEMMA_SIZES, "num_hidden_layers": layers, "head_dim": 8, "layer_types": None}
        | {"query_pre_attn_scalar": scale, "rope_parameters": {**PLAIN, "rope_theta": 1e4}}
    )
    keys = ("attention.key_length", "attention.value_length")
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return "gemma2", config, {**dict.fromkeys(keys, 8), "attention.sliding_window": 12, **caps}


#: Configurations by llama.cpp's architecture, and the further keys that it writes.
SAID: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "llama 3.1": ("llama", LlamaConfig(**SIZES, rope_parameters=LLAMA3), {}),
    "llama, linear": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters=LINEAR),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama with biases": ("llama", LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), {}),
    "qwen2, yarn": (
        "qwen2",
        Qwen2Config(**SIZES, rope_parameters=YARN),
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
    ),
    "phi3, longrope and a window": (
        "phi3",
        Phi3Config(
            **SIZES,
            rope_parameters=LONGROPE,
            original_max_position_embeddings=40,
            sliding_window=24,
        ),
        {
            "rope.scaling.original_context_length": 40,
            "rope.scaling.attn_factor": 1.2,
            "attention.sliding_window": 24,
        },
    ),
    "starcoder2, theta": (
        "starcoder2",
        Starcoder2Config(**SIZES, rope_parameters=PLAIN, sliding_window=None),
        {"rope.freq_base": 777.0},
    ),
    "gemma3, scaled where there is no window": (
        "gemma3",
        Gemma3TextConfig(**GEMMA_SIZES, rope_parameters=GEMMA),
        {
            "rope.freq_base": 1e6,
            "rope.scaling.type": "linear",
            "rope.scaling.factor": 8.0,
            "attention.sliding_window": 12,
            "attention.sliding_window_pattern": [True, False],
            "attention.key_length": 16,
            "attention.value_length": 16,
        },
    ),
    "gemma2 of 9 billion weights, scaled by the head size": gemma2(layers=2, scale=8),
    "gemma2 of 27 billion weights, scaled by the width": gemma2(layers=46, scale=16),
}


def write(
    path: Path,
    model: Any,
    architecture: str,
    said: Mapping[str, Any],
    tensors: Mapping[str, Any] | None = None,
    pattern: str = "gpt-2",
) -> None:
    """Write a model as llama.cpp's converter does."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(size)
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(config.norm_epsilon)
    if "rope_theta" in config.rope_parameters and "rope.freq_base" not in said:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    kinds = {int: "uint32", float: "float32", str: "string", list: "array"}
    for key, value in said.items():
        getattr(writer, f"add_{kinds[type(value)]}")(f"{architecture}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pattern)
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (len(TOKENS) - 1) + [3])
    writer.add_token_merges(["a b"])
    for name in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{name}_token_id")(len(TOKENS) - 1)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            values = values.reshape(-1, 2, size // 2, *values.shape[1:]).swapaxes(1, 2)
            values = values.reshape(tensor.shape)
        if architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            values = values + 1
        own, _, kind = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(own)}.{kind}", np.ascontiguousarray(values))
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.asarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def of_the_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors in which llama.cpp keeps a rotary embedding."""
    if parameters.get("rope_type") == "longrope":
        long, short = parameters["long_factor"], parameters["short_factor"]
        return {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    if parameters.get("rope_type") != "llama3":
        return {}
    scaled, plain = (
        LlamaConfig(**SIZES, rope_parameters=given)
        for given in (parameters, {**parameters, "rope_type": "default"})
    )
    frequencies = [build(one).model.rotary_emb.inv_freq.numpy() for one in (scaled, plain)]
    return {"rope_freqs.weight": frequencies[1] / frequencies[0]}


@pytest.mark.parametrize("which", SAID)
def test_settings_and_tensors_that_transformers_drops_are_applied(
    which: str, tmp_path: Path
) -> None:
    architecture, config, said = SAID[which]
    model = build(config)
    model.set_attn_implementation("eager")  # sdpa of transformers 5.19 ignores the caps of Gemma 2
    with torch.no_grad():
        for one in model.parameters():  # biases too
            one.add_(0.05 * torch.randn(one.shape, generator=torch.Generator().manual_seed(1)))
    file = tmp_path / "model.gguf"
    write(file, model, architecture, said, of_the_rope(config.rope_parameters))
    ids = torch.randint(0, 256, (100,), generator=torch.Generator().manual_seed(2))
    with AsyncTransformer.from_name(str(file)) as lm:
        for length in (20, 100):
            with torch.inference_mode():
                expected = model(ids[None, :length], use_cache=False).logits[0, -1].log_softmax(-1)
            row = lm.next_token_logprobs_sync(ids[:length].tolist())[: len(expected)]
            torch.testing.assert_close(row, expected, atol=1e-3, rtol=0)


def test_frequencies_without_a_setting_are_divided_in_the_model(tmp_path: Path) -> None:
    model = build(LlamaConfig(**SIZES))
    factors = np.linspace(1.0, 5.0, 8, dtype=np.float32)
    write(tmp_path / "model.gguf", model, "llama", {}, {"rope_freqs.weight": factors})
    model.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    ids = [*range(60)]
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    with AsyncTransformer.from_name(str(tmp_path)) as lm:
        row = lm.next_token_logprobs_sync(ids)[: len(expected)]
    torch.testing.assert_close(row, expected, atol=1e-3, rtol=0)


def test_unsupported_gguf_setting_is_rejected_by_name(tmp_path: Path) -> None:
    model = build(LlamaConfig(**SIZES))
    tried: tuple[tuple[str, dict[str, Any], dict[str, Any], str], ...] = (
        ("tensor", {}, {"blk.0.attn_q_norm.weight": [1.0] * 16}, r"blk\.0\.attn_q_norm\.weight"),
        ("key", {"attention.clamp_kqv": 8.0}, {}, r"attention\.clamp_kqv=8\.0"),
        ("type", {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0}, {}, "'dynamic'"),
    )
    for name, said, tensors, named in tried:
        file = tmp_path / f"{name}.gguf"
        write(file, model, "llama", said, tensors)
        with pytest.raises(EngineError, match=f"{named}.*own folder"):
            AsyncTransformer.from_name(str(file))


@pytest.mark.parametrize(
    ("pattern", "known"), [("llama-bpe", True), ("gpt-2", True), ("deepseek-llm", False)]
)
def test_a_pattern_that_transformers_does_not_know_is_logged(
    pattern: str, known: bool, tmp_path: Path
) -> None:
    model = build(LlamaConfig(**SIZES))
    write(tmp_path / "model.gguf", model, "llama", {}, pattern=pattern)
    with capture_logs() as events, AsyncTransformer.from_name(str(tmp_path)) as lm:
        lm.encode("2023")
    said = [event for event in events if event["event"] == "tokenizer.pattern_unknown"]
    assert [event["pattern"] for event in said] == [pattern] * (not known)
