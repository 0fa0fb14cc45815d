"""A tiny random Llama with a byte tokenizer, and two LoRA adapters of it, in a folder."""

from __future__ import annotations

from pathlib import Path

import torch


def write_model(folder: Path) -> tuple[str, dict[str, str]]:
    """Write the model and its adapters; returns the model's folder and the adapters' by name."""
    import peft
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    model_folder = str(folder / "model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({s: i for i, s in enumerate([*alphabet, "<end>"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(
        model_folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=640,
        bos_token_id=256,
        eos_token_id=256,
        pad_token_id=256,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():  # rows far from uniform, so that a mix-up shows
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
    model.save_pretrained(model_folder)
    adapters = {}
    for name, rank, targets in (
        ("a", 4, ["q_proj", "v_proj"]),
        ("b", 8, ["q_proj", "k_proj", "down_proj"]),
    ):
        torch.manual_seed(rank)
        base = AutoModelForCausalLM.from_pretrained(model_folder)
        lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets)
        adapted = peft.get_peft_model(base, lora)
        with torch.no_grad():
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_(0, 0.3)
        adapters[name] = str(folder / f"adapter-{name}")
        adapted.save_pretrained(adapters[name])
    return model_folder, adapters
