"""Plain models with the values of quantised ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM


def dequantised(model: Any, folder: str) -> Any:
    """A plain model with the values of a quantised one that has not computed anything yet."""
    import bitsandbytes as bnb

    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, bnb.nn.Linear8bitLt):
            values = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        elif isinstance(module, bnb.nn.Linear4bit):
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            continue
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(values)
    return plain
