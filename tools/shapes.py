"""Models of random weights in the shapes of real ones, made on the spot: speed does not depend on
the values."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

VOCABULARY = 49_152

#: Width, layers, heads, key/value heads, inner width.
Sizes = tuple[int, int, int, int, int]


def _transformer(sizes: Sizes) -> dict[str, Any]:
    """The settings that shapes with attention have in common."""
    width, layers, heads, kv_heads, inner = sizes
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width // heads,
        "intermediate_size": inner,
        "max_position_embeddings": 4096,
    }


def _llama(sizes: Sizes) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_transformer(sizes))


def _gemma2(sizes: Sizes, window: int) -> Any:
    """Every other layer has a window, and logits have soft caps."""
    from transformers import Gemma2Config

    return Gemma2Config(**_transformer(sizes), sliding_window=window)


def _mamba(width: int, layers: int) -> Any:
    from transformers import MambaConfig

    return MambaConfig(vocab_size=VOCABULARY, hidden_size=width, num_hidden_layers=layers)


SHAPES = {
    "tiny": partial(_llama, (64, 2, 4, 2, 128)),
    "small": partial(_llama, (128, 2, 4, 2, 256)),  # vLLM's attention on a CPU needs heads of 32
    "tiny-gemma2": partial(_gemma2, (64, 4, 4, 2, 128), 16),
    "tiny-mamba": partial(_mamba, 64, 2),
    "135m": partial(_llama, (576, 30, 9, 3, 1536)),
    "1b": partial(_llama, (2048, 16, 32, 8, 8192)),
    "8b": partial(_llama, (4096, 32, 32, 8, 14336)),
    "gemma2": partial(_gemma2, (1024, 26, 8, 4, 4096), 512),
    "mamba": partial(_mamba, 768, 24),
}


def model_of(shape: str, device: str, dtype: torch.dtype) -> Any:
    """A model of a shape's name, with random weights, on a device.

    In float32 they are large enough that a token far back changes the row. In half precision its
    rows would be noise then, and state be reused in another way than that of real models.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = SHAPES[shape]()
    config.initializer_range = 0.1 if dtype == torch.float32 else 0.02
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
