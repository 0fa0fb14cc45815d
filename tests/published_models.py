"""Folders of published models, scaled down: an engine computes what transformers reads in each, or
rejects it by name, and verification rejects none that an engine serves."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from genlm.core.checks import describe_error
from genlm.kit.verify.reference import Unanswered
from tests.hub_folders import Change, pickled, sharded, stored
from tests.published_configs import CONFIGS
from tests.sound_loads import Loads, SharedReference
from tests.sweep import random_model
from tools.tiny import write_tokenizer

#: What every folder has beside its weights.
GENERATION = {"bos_token_id": 1, "eos_token_id": [2, 3], "do_sample": True, "temperature": 0.6}


def renamed(old: str, new: str) -> Change:
    """A change of the beginnings of names of weights."""
    return stored(
        lambda held: {
            new + name.removeprefix(old) if name.startswith(old) else name: each
            for name, each in held.items()
        }
    )


def with_buffers(layer: str, buffers: Mapping[str, torch.Tensor]) -> Change:
    """A change that stores buffers in each layer, as older versions of transformers did."""
    return stored(
        lambda held: (
            held
            | {
                f"{layer.format(at)}.{name}": each
                for at in range(2)
                for name, each in buffers.items()
            }
        )
    )


def with_head(table: str) -> Change:
    """A change that stores tied embeddings twice."""
    return stored(lambda held: held | {"lm_head.weight": held[table]})


def with_beside(*names: str) -> Change:
    """A change that stores other weights beside the model's, in files of these names."""

    def change(folder: Path) -> None:
        file = next(folder.glob("model*.safetensors"))
        others = {name: each + 1 for name, each in load_file(file).items()}
        for name in names:
            if name.endswith(".safetensors"):
                save_file(others, folder / name, {"format": "pt"})
            else:
                torch.save(others, folder / name)

    return change


MASK = {"bias": torch.ones(1, 1, 64, 64).tril(), "masked_bias": torch.tensor(-1e9)}
OF_GPT2 = {"attn.bias": MASK["bias"]}
OF_GPT_J = {f"attn.{name}": each for name, each in MASK.items()}
OF_GPT_NEO = {f"attn.attention.{name}": each for name, each in MASK.items()}
OF_PYTHIA = {"attention.bias": MASK["bias"].bool(), "attention.masked_bias": MASK["masked_bias"]}
OF_GPT_NEOX = {**OF_PYTHIA, "attention.rotary_emb.inv_freq": torch.ones(16)}
OF_LLAMA = {"self_attn.rotary_emb.inv_freq": torch.ones(16)}

#: How the weights of models are stored, where transformers would store them otherwise.
STORED: Mapping[str, Sequence[Change]] = {
    "BLOOM 560M": [renamed("transformer.", "")],
    "BLOOMZ": [renamed("transformer.", ""), pickled],
    "CodeGen 350M": [
        with_buffers("transformer.h.{}", {"attn.causal_mask": MASK["bias"]}), pickled],
    "DistilGPT-2": [with_buffers("transformer.h.{}", OF_GPT2), with_beside("pytorch_model.bin")],
    "Falcon 40B": [sharded],
    "Falcon 7B": [pickled],
    "GPT-2": [renamed("transformer.", ""), with_buffers("h.{}", OF_GPT2)],
    "GPT-J 6B": [with_buffers("transformer.h.{}", OF_GPT_J), pickled],
    "GPT-Neo 125M": [with_buffers("transformer.h.{}", OF_GPT_NEO), pickled],
    "GPT-NeoX 20B": [with_buffers("gpt_neox.layers.{}", OF_GPT_NEOX), sharded],
    "Llama 1": [with_buffers("model.layers.{}", OF_LLAMA), pickled],
    "Llama 2 7B": [
        with_buffers("model.layers.{}", OF_LLAMA), sharded,
        with_beside("pytorch_model-00001-of-00002.bin")],
    "Llama 3 8B": [sharded],
    "Llama 3.2 1B": [with_head("model.embed_tokens.weight")],
    "Mistral 7B v0.3": [sharded, with_beside("consolidated.safetensors")],
    "Mistral Nemo": [sharded, with_beside("consolidated.safetensors")],
    "Mixtral 8x7B": [sharded, with_beside("consolidated.00.pt")],
    "OPT 125M": [renamed("model.decoder.", "decoder."), pickled],
    "OPT 350M": [pickled],
    "Pythia 70M": [
        with_buffers("gpt_neox.layers.{}", OF_PYTHIA), with_beside("pytorch_model.bin")],
    "Qwen 2.5 7B": [sharded],
    "TinyLlama 1.1B": [with_beside("pytorch_model.bin")],
}  # fmt: skip

#: The models whose weights are stored in place of those of a model that transformers cannot make:
#: it does not have the family, or the name of the rotary embedding.
OF_NO_FAMILY = "Llama 3 8B"
OF_NO_ROPE = {"Phi 3 mini 128k": "Phi 3.5 mini"}


def write(name: str, folder: Path, dtype: str) -> None:
    """Write a model's folder."""
    from transformers import (
        CONFIG_MAPPING,
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
        GenerationConfig,
    )

    published = {key: value for key, value in CONFIGS[name].items() if value != ()}
    known = MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    def of(like: str) -> tuple[Any, Any]:
        """The class of a model, and its configuration; ``None`` where transformers has no class,
        although an engine may have registered a configuration of its own."""
        built = {key: value for key, value in CONFIGS[like].items() if value != ()}
        if built["model_type"] not in CONFIG_MAPPING:
            return None, None
        config = CONFIG_MAPPING[built["model_type"]].from_dict(json.loads(json.dumps(built)))
        kinds = (mapping[type(config)] for mapping in known if type(config) in mapping)
        return next(kinds, None), config

    kind, config = of(OF_NO_ROPE.get(name, name))
    if kind is None:
        kind, config = of(OF_NO_FAMILY)
    model = random_model(kind, config).to(getattr(torch, dtype))
    model.generation_config = GenerationConfig()  # transformers would not save some models' own
    model.save_pretrained(folder)
    write_tokenizer(folder)
    published["torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(published, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    for change in STORED.get(name, ()):
        change(folder)


#: Each of so many folders is also tried with weights of the other types.
FOLDERS_PER_OTHER_TYPE = 4


class EveryPublishedModel(Loads):
    """Tests that every folder is computed as transformers reads it, or rejected for the reason
    given. The first type of weights is tried with all folders.

    Attributes:
        rejected: Parts of the messages of those that it rejects, or that transformers cannot
            compute, by the models' names.
        rejected_types: The same for types of weights, by the models' names and the types.
    """

    rejected: Mapping[str, str]
    rejected_types: Mapping[tuple[str, str], str] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "name" in metafunc.fixturenames:
            first, *others = self.dtypes
            cases = [(name, first) for name in CONFIGS]
            few = [*CONFIGS][::FOLDERS_PER_OTHER_TYPE]
            cases += [(name, dtype) for dtype in others for name in few]
            metafunc.parametrize(("name", "dtype"), cases)

    def test_a_folder(
        self,
        name: str,
        dtype: str,
        table: dict[tuple[str, str], str],
        reference: SharedReference,
        tmp_path: Path,
    ) -> None:
        write(name, tmp_path, dtype)
        known = self.rejected_types.get((name, dtype), self.rejected.get(name))
        try:
            report = self.compared(tmp_path, dtype, reference)
        except Exception as error:  # transformers' own errors come as they are
            outcome = "no reference" if isinstance(error, Unanswered) else "rejected"
            table[name, dtype] = f"{outcome}: {' '.join(describe_error(error).split()):.300}"
            if known is None or known not in str(error):
                raise
            return
        worst = max(report.compared, key=lambda one: one.apart / one.allowed)
        verdict = "right" if report.passed else f"wrong: {worst.about}"
        table[name, dtype] = f"{verdict}: {worst.apart:.1e} of {worst.allowed:.1e}"
        assert report.passed, report
        assert known is None
