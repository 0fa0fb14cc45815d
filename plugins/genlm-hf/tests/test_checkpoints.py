"""The files and tensors of a checkpoint that transformers and an engine's loader read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CamembertConfig,
    CamembertForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
)

from genlm.core import EngineError, ModelNotFoundError
from genlm.kit.checkpoints import (
    read_by_transformers,
    require_all_read,
    require_weights,
)
from genlm.kit.loads import Load, Reading, watch_load
from genlm.kit.settings import is_read

Weights = Iterable[tuple[str, torch.Tensor]]

SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Loader(torch.nn.Module):
    """A loader that loads the given tensors, each in its own way."""

    def __init__(self, load: Callable[[torch.Tensor, torch.Tensor], Any], names: set[str]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3), requires_grad=False)
        self.load, self.names = load, names

    def load_weights(self, weights: Weights) -> None:
        for name, tensor in weights:
            viewed = tensor.narrow(0, 0, 2).t()  # also of a tensor that the loader ignores
            if name in self.names:
                self.load(self.weight, viewed)


def in_a_thread(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    with ThreadPoolExecutor() as pool:
        pool.submit(weight.data[:2].copy_, tensor.t()).result()


def as_it_is(weight: torch.Tensor, tensor: torch.Tensor) -> None:
    weight.data = tensor


LOADS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copied": lambda weight, tensor: weight.data[:2].copy_(tensor.t()),
    "converted": lambda weight, tensor: tensor.to(torch.float16),
    "joined": lambda weight, tensor: torch.cat([tensor, tensor]),
    "copied in a thread": in_a_thread,
    "kept": as_it_is,
}


@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("mapped", [False, True], ids=["each in memory", "in one file"])
def test_tensors_that_a_loader_ignores_are_reported(how: str, mapped: bool) -> None:
    whole = torch.ones(16, 3)
    pieces = dict(zip("abcd", whole.split(4), strict=True))
    if not mapped:
        pieces = {name: piece.clone() for name, piece in pieces.items()}
    pieces["zeros"] = torch.zeros(4, 3)
    reading, model = Reading(), Loader(LOADS[how], {"b"})
    with reading.watched():
        model.load_weights(reading.of(pieces.items()))
    assert reading.unread(model) == {"a": (4, 3), "c": (4, 3), "d": (4, 3)}


def test_tensor_in_memory_of_a_freed_one_counts_separately() -> None:
    """Large tensors are not kept, so their memory may hold the next one."""
    reading, place = Reading(), torch.ones(1 << 19)
    weights = [("first", place), ("second", place.view(2, -1)), ("third", place[: 1 << 18])]
    assert [name for name, _ in reading.of(weights)] == ["first", "second", "third"]
    assert [*reading.unread(torch.nn.Module())] == ["third"]


def test_parameter_without_memory_before_the_load_is_not_marked() -> None:
    """SGLang makes the parameters of a GGUF file so."""

    class Lazy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.later = torch.nn.UninitializedParameter(requires_grad=False)
            self.never = torch.nn.UninitializedParameter(requires_grad=False)

        def load_weights(self, weights: Weights) -> None:
            for _, tensor in weights:
                self.later.materialize(tensor.shape)
                self.later.data.copy_(tensor)

    loads: list[Load] = []
    model = Lazy()
    watch_load(model, lambda _, load: loads.append(load))
    model.load_weights([("later", torch.ones(2, 3))])
    assert loads == [Load({}, [])]
    assert model.later.equal(torch.ones(2, 3))


def test_large_tensor_freed_by_a_loader_stays_unread() -> None:
    """Although others take its place in memory, of the checkpoint and of the loader."""
    reading, place = Reading(), bytearray(b"\1" * (4 << 19))

    def at_the_place() -> torch.Tensor:
        return torch.frombuffer(place, dtype=torch.float32)

    with reading.watched():
        for name, tensor in reading.of((name, at_the_place()) for name in ("a", "b", "c")):
            if name == "b":
                tensor.sum()
            del tensor
        at_the_place().sum()
    assert [*reading.unread(torch.nn.Module())] == ["a", "c"]


MIXTRAL = MixtralConfig(**SIZES, num_local_experts=2)
BIAS, EXPERT = "model.layers.0.self_attn.q_proj.bias", "block_sparse_moe.experts.0.w1.weight"
MATTERS = [
    (LlamaConfig(**SIZES, attention_bias=True), {BIAS: (8,)}, BIAS),
    (LlamaConfig(**SIZES, attention_bias=True), {f"language_model.{BIAS}": (8,)}, BIAS),
    (LlamaConfig(**SIZES), {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}, None),
    (LlamaConfig(**SIZES), {"model.vision_tower.layers.0.self_attn.q_proj.bias": (8,)}, None),
    (LlamaConfig(**SIZES), {"model.layers.7.mlp.up_proj.weight": (8, 8)}, None),
    (MIXTRAL, {f"model.layers.0.{EXPERT}": (8, 8)}, EXPERT),  # another name in transformers
]


@pytest.mark.parametrize(("settings", "unread", "named"), MATTERS)
def test_unread_tensor_is_rejected_if_transformers_reads_it(
    settings: Any, unread: dict[str, Any], named: str | None
) -> None:
    if named is None:
        return require_all_read(unread, "a model", None, settings, "Engine")
    with pytest.raises(EngineError, match=rf"{named} \(1 weights .*Engine leaves .*backend='hf'"):
        require_all_read(unread, "a model", None, settings, "Engine")


NO_PLACE = [
    {BIAS: (8,)},
    {"language_model.layers.0.self_attn.q_norm.weight": (4,)},
    {"model.layers.0.self_attn.q_proj.lora_A.default.weight": (4, 8)},
    {"lm_head.bias": (16,)},
]


@pytest.mark.parametrize("unread", NO_PLACE)
def test_weight_without_a_place_in_its_layer_is_rejected(unread: dict[str, Any]) -> None:
    (name,) = unread
    said = rf"has {name} \(1 such .* LlamaForCausalLM has no place .*correct config\.json"
    with pytest.raises(EngineError, match=said):
        require_all_read(unread, "a model", None, LlamaConfig(**SIZES), "Engine")


OLD_BUFFERS = {
    "model.layers.0.self_attn.bias": (1, 1, 16, 16),
    "model.layers.0.self_attn.masked_bias": (),
    "model.layers.0.self_attn.k_scale": (1,),
    "v_head.summary.weight": (1, 8),
    "mtp.layers.0.mlp.up_proj.weight": (8, 8),
}


def test_buffers_and_further_heads_have_no_place_and_are_accepted() -> None:
    require_all_read(OLD_BUFFERS, "a model", None, LlamaConfig(**SIZES), "Engine")


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_omitted_head_beside_tied_embeddings_is_rejected_if_it_differs(
    tmp_path: Path, prefix: str
) -> None:
    settings = LlamaConfig(**SIZES, tie_word_embeddings=True)
    held = {
        f"{prefix}model.embed_tokens.weight": torch.randn(16, 8),
        f"{prefix}lm_head.weight": torch.randn(16, 8),
    }
    unread = {f"{prefix}lm_head.weight": (16, 8)}
    save_file(held, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=r"differ, but with .*Engine takes one for"):
        require_all_read(unread, "a model", tmp_path, settings, "Engine")
    held[f"{prefix}lm_head.weight"] = held[f"{prefix}model.embed_tokens.weight"].clone()
    save_file(held, tmp_path / "model.safetensors")
    require_all_read(unread, "a model", tmp_path, settings, "Engine")
    both = unread | {f"{prefix}model.embed_tokens.weight": (16, 8)}
    with pytest.raises(EngineError, match=r"\(2 weights in all\)"):
        require_all_read(both, "a model", tmp_path, settings, "Engine")


def write(folder: Path, name: str, value: float) -> None:
    """A file of weights that are all alike."""
    with torch.no_grad():
        model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False))
        held = {one: torch.full_like(weight, value) for one, weight in model.state_dict().items()}
    if name.endswith(".safetensors"):
        save_file(held, folder / name, {"format": "pt"})
    else:
        torch.save(held, folder / name)
    file = folder / "model.safetensors.index.json"
    if name == "shard.safetensors":
        file.write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(held, name)}))


FILES = ["model.safetensors", "shard.safetensors", "pytorch_model.bin", "another.safetensors"]


@pytest.mark.parametrize("first", range(3))
def test_read_files_match_transformers(tmp_path: Path, first: int) -> None:
    LlamaConfig(**SIZES, tie_word_embeddings=False).save_pretrained(tmp_path)
    for at, name in enumerate(FILES[first:], first):
        write(tmp_path, name, float(at))
    found = [str(tmp_path / name) for name in FILES[first:]]
    assert read_by_transformers(str(tmp_path), found) == found[:1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert {one.min().item() for one in model.parameters()} == {float(first)}


def test_folder_unknown_to_transformers_is_left_to_the_engine(tmp_path: Path) -> None:
    write(tmp_path, "consolidated.safetensors", 0.0)
    found = [str(tmp_path / "consolidated.safetensors")]
    assert read_by_transformers(str(tmp_path), found) == found


def test_tied_weights_are_present_under_any_of_their_names(tmp_path: Path) -> None:
    """CamemBERT's output layer comes before the embeddings to which it is tied, so its name is the
    first of the two; the checkpoint has the other."""
    model = CamembertForCausalLM(CamembertConfig(**SIZES, max_position_embeddings=16))
    model.save_pretrained(tmp_path)
    require_weights(str(tmp_path), model.config)
    weights = load_file(tmp_path / "model.safetensors")
    (table,) = (name for name in weights if "word_embeddings" in name)
    del weights[table]
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(ModelNotFoundError, match=r"lacks weights of Camembert.*decoder\.weight"):
        require_weights(str(tmp_path), model.config)


def test_part_of_a_settings_name_does_not_match() -> None:
    assert is_read("gemma2", "hidden_activation")
    assert not is_read("gemma2", "hidden_act")
