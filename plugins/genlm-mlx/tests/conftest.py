from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.models.falcon_h1 import FalconH1Config
from transformers.models.gemma2 import Gemma2Config
from transformers.models.gemma3 import Gemma3TextConfig
from transformers.models.gpt2 import GPT2Config
from transformers.models.lfm2 import Lfm2Config
from transformers.models.llama import LlamaConfig
from transformers.models.mamba import MambaConfig
from transformers.models.mistral import MistralConfig
from transformers.models.phi import PhiConfig
from transformers.models.qwen2 import Qwen2Config

from tests.adapter_kinds import Kind, make_adapter
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_tokenizer

if sys.platform == "linux":
    # Imported first, so that MLX finds PyTorch's BLAS before the slow one in its own wheel, which
    # the real model needs.
    ctypes.CDLL(
        str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"), mode=ctypes.RTLD_GLOBAL
    )

SIZES = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 3}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}

LFM2 = {
    "block_dim": 32,
    "block_ff_dim": 48,
    "block_multiple_of": 8,
    "block_auto_adjust_ff_dim": False,
    "conv_bias": False,
}

FALCON_H1 = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_chunk_size": 16,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.7,
    "attention_in_multiplier": 0.6,
    "key_multiplier": 0.4,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.9, 0.5],
    "ssm_multipliers": [0.9, 0.8, 1.1, 0.7, 1.2],
}

LLAMA = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "max_position_embeddings": 1100,  # more than 1,024, so that a context is computed in two chunks
}

#: One tiny model for each way of keeping state: plain, with absolute positions, rotating, with
#: windows that mlx-lm lacks, recurrent, and hybrids.
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES, **HEADS, **LLAMA),
    "gpt2": GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "gemma3": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, **HEADS, sliding_window=12, query_pre_attn_scalar=8
    ),
    "gemma2": Gemma2Config(**SIZES, **HEADS, query_pre_attn_scalar=8, sliding_window=12),
    "mistral": MistralConfig(**SIZES, **HEADS, sliding_window=12),
    "qwen2": Qwen2Config(
        **SIZES, **HEADS, sliding_window=9, use_sliding_window=True, max_window_layers=1
    ),
    "phi": PhiConfig(**SIZES, num_attention_heads=4, intermediate_size=48),
    "falcon_h1": FalconH1Config(**SIZES, **HEADS, **FALCON_H1),
    "mamba": MambaConfig(**SIZES, state_size=8, intermediate_size=64, time_step_rank=4),
    "lfm2": Lfm2Config(**SIZES, **HEADS, **LFM2, layer_types=["conv", "full_attention", "conv"]),
}


def make_model(config: Any, folder: Path) -> Path:
    """A folder with a random model and a tokenizer of the 256 bytes."""
    torch.manual_seed(0)
    config.initializer_range = 0.3
    return save_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)


def save_model(model: Any, folder: Path) -> Path:
    """A folder with a model and a tokenizer of the 256 bytes."""
    model.save_pretrained(folder)
    if model.config.model_type == "gpt2":  # in the hub's layout, which mlx-lm reads
        weights = load_file(folder / "model.safetensors")
        weights = {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a tiny model folder per family, once."""
    made: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_model(CONFIGS[family], tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture
def saved(tmp_path: Path) -> Callable[[Any], str]:
    """Makes a random model of a configuration, and returns its folder."""
    return lambda config: str(make_model(config, tmp_path))


@pytest.fixture(scope="session")
def lora_folders(
    folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """PEFT adapters of the tiny llama, with different ranks and layers."""
    settings = {
        "a": {"r": 2, "target_modules": ["q_proj", "v_proj"]},
        "b": {"r": 4, "target_modules": ["o_proj", "gate_proj"]},
    }
    model, folder = str(folders("llama")), tmp_path_factory.mktemp("lora")
    return {
        name: make_adapter(Kind(name, given), model, folder / name)
        for name, given in settings.items()
    }
