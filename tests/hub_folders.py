"""Folders of models as various tools write them. An engine computes what transformers reads in each
folder, or rejects the folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from safetensors.torch import load_file, save_file

from tests.sweep import SHARED, THRESHOLD, Sweep, Tried, tried

#: Changes to the folder of a small Llama, as other tools write it.
Change = Callable[[Path], None]

Tensors = dict[str, torch.Tensor]


def configured(**settings: Any) -> Change:
    """A change that sets other settings; ``()`` removes one."""

    def change(folder: Path) -> None:
        file = folder / "config.json"
        config = json.loads(file.read_text()) | settings
        file.write_text(json.dumps({name: each for name, each in config.items() if each != ()}))

    return change


def stored(to: Callable[[Tensors], Tensors]) -> Change:
    """A change that stores other weights."""

    def change(folder: Path) -> None:
        file = folder / "model.safetensors"
        save_file({name: each.clone() for name, each in to(load_file(file)).items()}, file)

    return change


def pickled(folder: Path) -> None:
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def sharded(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = sorted(load_file(file).items())
    file.unlink()
    parts = {"model-1-of-2.safetensors": tensors[::2], "model-2-of-2.safetensors": tensors[1::2]}
    for name, part in parts.items():
        save_file(dict(part), folder / name, {"format": "pt"})
    places = {tensor: name for name, part in parts.items() for tensor, _ in part}
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


OLDER: Mapping[str, Any] = {
    "rope_parameters": (),
    "rope_theta": 500.0,
    "transformers_version": "4.40",
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
BUFFER = "model.layers.0.self_attn.rotary_emb.inv_freq"

HUB: Mapping[str, Change] = {
    "linear rope of transformers 4": configured(
        **OLDER, rope_scaling={"type": "linear", "factor": 2.0}
    ),
    "Llama 3's rope of transformers 4": configured(
        **OLDER,
        rope_scaling={
            "rope_type": "llama3",
            "original_max_position_embeddings": THRESHOLD,
            **LLAMA3,
        },
    ),
    "defaults are left out": configured(tie_word_embeddings=(), rms_norm_eps=(), attention_bias=()),
    "another family's settings": configured(
        sliding_window=THRESHOLD, final_logit_softcapping=3.0, hidden_activation="gelu"
    ),
    "another family's scale": configured(logit_scale=0.1),
    "no architecture": configured(architectures=()),
    "a head beside tied embeddings": configured(tie_word_embeddings=True),
    "names without their beginning": stored(
        lambda held: {name.removeprefix("model."): each for name, each in held.items()}
    ),
    "old buffers, and no last norm": stored(
        lambda held: (
            {n: each for n, each in held.items() if n != "model.norm.weight"}
            | {BUFFER: torch.ones(16)}
        )
    ),
    "old buffers": stored(lambda held: held | {BUFFER: torch.ones(16)}),
    "shards": sharded,
    "pickled": pickled,
}


def loaded(name: str, sweep: Sweep, folder: Path) -> Tried:
    """The outcome of loading the folder of this name in an engine."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def save(model: Any, path: Path) -> None:
        sweep.save(model, path)
        HUB[name](path)

    config = LlamaConfig(**{**SHARED, "num_hidden_layers": 2})
    found = tried(LlamaForCausalLM, config, {}, folder, sweep.load, save)
    return evolve(found, family=name)
