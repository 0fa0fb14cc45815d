from __future__ import annotations

import pytest
from transformers import LlamaConfig, MambaConfig

from tests.adapter_kinds import Kind, make_adapter
from tests.fixtures import *  # noqa: F403
from tools.tiny import write_tokenizer

from .models import Pair, build, llama_config, proven
from .shapes import SHAPE, TOKENS

#: Widths that 4-bit quantisation can divide into its blocks.
BLOCKS = {"hidden_size": 64, "intermediate_size": 128}


@pytest.fixture
def llama() -> Pair:
    return proven(llama_config())


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Llama and a byte tokenizer."""
    folder = str(tmp_path_factory.mktemp("tiny"))
    write_tokenizer(folder, "<end>")
    build(LlamaConfig(**{**SHAPE, **BLOCKS})).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a random Mamba and the same tokenizer."""
    folder = str(tmp_path_factory.mktemp("recurrent"))
    write_tokenizer(folder, "<end>")
    config = MambaConfig(vocab_size=TOKENS, hidden_size=32, num_hidden_layers=2, state_size=4)
    build(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def lora_folders(tiny: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two LoRA adapters of different rank and layers."""
    pytest.importorskip("peft", reason="LoRA needs peft")
    settings = {
        "a": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
        "b": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "down_proj"]},
    }
    folder = tmp_path_factory.mktemp("lora")
    return {
        name: make_adapter(Kind(name, given), tiny, folder / name)
        for name, given in settings.items()
    }
