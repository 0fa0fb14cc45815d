"""A folder that has only a GGUF file in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM

from genlm.hf import AsyncTransformer

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


def test_a_folder_with_a_gguf_file(folder: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, gguf_file="tiny.gguf")
    with AsyncTransformer.from_name(str(folder)) as lm:
        ids = lm.tokenizer.encode("abc", add_special_tokens=False)
        assert b"".join(lm.byte_vocab[i].byte_string for i in ids) == b"abc"
        row = lm.next_token_logprobs_sync(ids)
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
    # transformers gives the tokenizer a token of its own, for which the model has no row.
    assert torch.allclose(row[: len(expected)], expected, atol=1e-4)
    assert (row[len(expected) :] == -float("inf")).all()
