"""Small random models and adapters, for programs that need many answers in little time."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch


def write_tokenizer(folder: Path | str, *more: str) -> int:
    """A tokenizer of the 256 bytes and of more tokens, of which the first is the end of text;
    returns how many there are."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *more]
    bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    ends = {"eos_token": more[0]} if more else {}
    PreTrainedTokenizerFast(tokenizer_object=bytewise, **ends).save_pretrained(folder)
    return len(tokens)


def write_model(model: str, folder: Path) -> str:
    """A small Llama of random weights with the tokenizer of a model; returns its folder.

    It answers many more requests in the same time. Its weights are large, so that its rows are not
    all alike.
    """
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(model)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def write_variant(
    model: str, folder: Path, weights: Mapping[str, torch.Tensor] | None = None, **settings: Any
) -> str:
    """A copy of a model with further weights, and with other settings in its ``config.json``;
    returns its folder."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder)
    if weights:
        held = load_file(folder / "model.safetensors")
        save_file({**held, **weights}, folder / "model.safetensors", {"format": "pt"})
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return str(folder)


def write_adapter(model: str, folder: Path, seed: int, rank: int = 4) -> str:
    """A LoRA adapter of random weights for a Llama-like model; returns its folder."""
    from safetensors.torch import save_file

    config = json.loads((Path(model) / "config.json").read_text())
    width = config["hidden_size"]
    head = config.get("head_dim") or width // config["num_attention_heads"]
    outputs = {
        "q_proj": head * config["num_attention_heads"],
        "v_proj": head * config["num_key_value_heads"],
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, output in outputs.items():
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("A", (rank, width)), ("B", (output, rank))):
                values = torch.randn(shape, generator=generator) / shape[1] ** 0.5
                weights[f"{place}.lora_{part}.weight"] = 0.3 * values
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model,
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(outputs),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config))
    return str(folder)
