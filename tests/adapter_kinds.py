"""Adapters of every kind that PEFT saves. Needs PEFT and transformers to make them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

#: The settings of every kind that does not override them.
PLAIN: Mapping[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}

Tensors = dict[str, Any]


@frozen
class Kind:
    """A kind of adapter.

    Attributes:
        name: The name of the kind in the table.
        settings: The settings of its ``LoraConfig`` beyond :data:`PLAIN`.
        dtype: The type in which its tensors are saved.
        change: The last change to its tensors.
        pickled: Whether its weights are saved as a pickle.
    """

    name: str
    settings: Mapping[str, Any] = {}
    dtype: str = "float32"
    change: Callable[[Tensors], Tensors] = dict
    pickled: bool = False


def _trained_embedding(tensors: Tensors) -> Tensors:
    return {
        name: tensor + 1 if "base_layer" in name else tensor for name, tensor in tensors.items()
    }


KINDS = (
    Kind("plain"),
    Kind("every linear layer", {"target_modules": "all-linear"}),
    Kind("q, k or v alone", {"target_modules": ["q_proj"]}),
    Kind("modules by a regular expression", {"target_modules": r".*\.(q|up)_proj"}),
    Kind("some layers only", {"layers_to_transform": [1]}),
    Kind("bfloat16 weights", dtype="bfloat16"),
    Kind("float16 weights", dtype="float16"),
    Kind("`rank_pattern`", {"rank_pattern": {"v_proj": 2}}),
    Kind("`alpha_pattern`", {"alpha_pattern": {"layers.1.self_attn.v_proj": 20}}),
    Kind("`use_rslora`", {"use_rslora": True}),
    Kind("`use_dora`", {"use_dora": True}),
    Kind("`bias` of the base model", {"bias": "all"}),
    Kind("`lora_bias`", {"lora_bias": True}),
    Kind("LoRA on the embedding", {"target_modules": ["embed_tokens", "q_proj"]}),
    Kind("LoRA on the output layer", {"target_modules": ["lm_head", "q_proj"]}),
    Kind(
        "embeddings of another base model",
        {"target_modules": ["embed_tokens", "q_proj"]},
        change=_trained_embedding,
    ),
    Kind("`modules_to_save`: the output layer", {"modules_to_save": ["lm_head"]}),
    Kind("`modules_to_save`: the embedding", {"modules_to_save": ["embed_tokens"]}),
    Kind("`modules_to_save`: a norm", {"modules_to_save": ["norm"]}),
    Kind("`trainable_token_indices`", {"trainable_token_indices": [5, 6, 7, 8]}),
    Kind(
        "`target_parameters`",
        {"target_modules": [], "target_parameters": ["mlp.down_proj.weight"]},
    ),
    Kind("`alora_invocation_tokens`", {"alora_invocation_tokens": [7, 8]}),
    Kind("`layer_replication`", {"layer_replication": [[0, 2], [1, 2]]}),
    Kind("`init_lora_weights` of PiSSA", {"init_lora_weights": "pissa"}),
    Kind("`init_lora_weights` of OLoRA", {"init_lora_weights": "olora"}),
    Kind("weights in a pickle", pickled=True),
)  # fmt: skip


def make_adapter(kind: Kind, model: str, folder: Path, seed: int = 1) -> str:
    """Save a random adapter of a kind for the model in a folder."""
    import torch
    from peft import LoraConfig, get_peft_model
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(**{**PLAIN, **kind.settings})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_magnitude" in name:
                parameter.mul_(1.5)
            elif "lora_" in name or "trainable_tokens_delta" in name:
                parameter.normal_(0, 0.3)
            elif "modules_to_save" in name or (kind.settings.get("bias") and "bias" in name):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    adapted.save_pretrained(folder)
    file = folder / "adapter_model.safetensors"
    tensors = {name: each.to(getattr(torch, kind.dtype)) for name, each in load_file(file).items()}
    save_file(kind.change(tensors), file)
    if kind.pickled:
        torch.save(tensors, folder / "adapter_model.bin")
        file.unlink()
    return str(folder)
