"""Adapters that name modules as transformers 4 did, or as the text model alone does."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    Qwen3MoeConfig,
)

from genlm.core import InvalidAdapterError
from genlm.core.mock import ByteTokenizer
from genlm.hf import AsyncTransformer

from .models import build
from .shapes import DEVICE, SHAPE

pytest.importorskip("peft", reason="LoRA needs peft")

CONTEXT = [72, 101, 108, 108, 111]
RANK, SCALE = 3, 2.0
SIZES = {**SHAPE, "vocab_size": 258}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}


def write(folder: Path, modules: Mapping[str, tuple[int, int]], **settings: Any) -> dict[str, Any]:
    """Save an adapter of modules with these inputs and outputs. Returns what the adapter adds to
    each weight."""
    torch.manual_seed(1)
    tensors, changes = {}, {}
    for name, (inputs, outputs) in modules.items():
        down, up = torch.randn(RANK, inputs) * 0.3, torch.randn(outputs, RANK) * 0.3
        tensors[f"base_model.model.{name}.lora_A.weight"] = down
        tensors[f"base_model.model.{name}.lora_B.weight"] = up
        changes[name] = (SCALE * up @ down).to(DEVICE)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, **settings}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return changes


@torch.no_grad()
def row(model: Any) -> torch.Tensor:
    return model(input_ids=torch.tensor([CONTEXT], device=DEVICE)).logits[0, -1].log_softmax(-1)


def check(base: Any, folder: Path, merged: Any) -> None:
    """The adapter gives the rows of the model that it was merged into by hand; the base model's
    stay."""
    with AsyncTransformer(base, ByteTokenizer(), cache_size=0) as lm:
        before = lm.next_token_logprobs_sync(CONTEXT)
        with capture_logs() as events:
            lm.add_new_lora(str(folder), "a")
        assert [event["event"] for event in events] == ["adapter.renamed"]
        found = lm.next_token_logprobs_sync(CONTEXT, lora_name="a")
        torch.testing.assert_close(found, row(merged), atol=1e-4, rtol=0)
        assert float((found - before).abs().max()) > 0.1
        torch.testing.assert_close(lm.next_token_logprobs_sync(CONTEXT), before, atol=1e-5, rtol=0)


def experts(family: str) -> tuple[Any, dict[str, tuple[int, int]], Callable[[str], str]]:
    """A model with experts, and the names of its modules under transformers 4 with the modules that
    they mean."""
    if family == "mixtral":
        model = build(MixtralConfig(**SIZES, num_local_experts=4))
        block, (gate, up, down), inner = "block_sparse_moe", ("w1", "w3", "w2"), 48
    else:
        model = build(Qwen3MoeConfig(**SIZES, **EXPERTS))
        block, (gate, up, down), inner = "mlp", ("gate_proj", "up_proj", "down_proj"), 16
    width, modules = 32, {}
    for layer in range(2):
        modules[f"model.layers.{layer}.self_attn.q_proj"] = (width, 32)
        at = f"model.layers.{layer}.{block}"
        modules[f"{at}.gate"] = (width, 4)
        for expert in range(4):
            for name in (gate, up):
                modules[f"{at}.experts.{expert}.{name}"] = (width, inner)
            modules[f"{at}.experts.{expert}.{down}"] = (inner, width)
    return model, modules, {gate: "gate", up: "up", down: "down"}.get


@torch.no_grad()
def merge_experts(model: Any, changes: Mapping[str, Any], kind: Callable[[str], Any]) -> Any:
    merged = copy.deepcopy(model)
    for name, change in changes.items():
        layer = merged.model.layers[int(name.split(".")[2])]
        *_, number, last = name.split(".")
        if last == "q_proj":
            layer.self_attn.q_proj.weight += change
        elif last == "gate":
            layer.mlp.gate.weight += change
        elif kind(last) == "down":
            layer.mlp.experts.down_proj[int(number)] += change
        else:
            halves = layer.mlp.experts.gate_up_proj[int(number)].chunk(2)
            halves[kind(last) == "up"].add_(change)
    return merged


@pytest.mark.parametrize(
    ("family", "listed"), [("mixtral", True), ("mixtral", False), ("qwen3_moe", True)]
)
def test_adapters_on_experts_and_routers_equal_merged_weights(
    family: str, listed: bool, tmp_path: Path
) -> None:
    model, modules, kind = experts(family)
    targets: Any = sorted({name.rpartition(".")[2] for name in modules}) if listed else ".*"
    changes = write(tmp_path, modules, target_modules=targets)
    check(model, tmp_path, merge_experts(model, changes, kind))


def check_refused(base: Any, folder: Path, said: str) -> None:
    with (
        AsyncTransformer(base, ByteTokenizer()) as lm,
        pytest.raises(InvalidAdapterError, match=said),
    ):
        lm.add_new_lora(str(folder), "a")


LEAVES = ["gate", "q_proj", "w1", "w2", "w3"]


@pytest.mark.parametrize(
    ("targets", "lacks"),
    [
        (LEAVES, "layers.1.self_attn.q_proj"),
        (rf".*\.({'|'.join(LEAVES)})", "layers.1.block_sparse_moe.gate"),
    ],
)
def test_adapter_file_without_a_layer_is_rejected(targets: Any, lacks: str, tmp_path: Path) -> None:
    model, modules, _ = experts("mixtral")
    kept = {name: shape for name, shape in modules.items() if not name.endswith(lacks)}
    write(tmp_path, kept, target_modules=targets)
    check_refused(model, tmp_path, f"{tmp_path} .*layers.1")


@pytest.mark.parametrize(
    "settings",
    [{"use_rslora": True}, {"rank_pattern": {"w1": RANK}}, {"alpha_pattern": {"mlp.w1": 1}}],
)
def test_settings_of_joined_modules_are_rejected(settings: dict[str, Any], tmp_path: Path) -> None:
    model, modules, _ = experts("mixtral")
    write(tmp_path, modules, target_modules=LEAVES, **settings)
    check_refused(model, tmp_path, f"{next(iter(settings))}=.*, which cannot be converted")


def test_adapter_for_part_of_joined_modules_is_rejected(tmp_path: Path) -> None:
    model, modules, _ = experts("mixtral")
    write(tmp_path, {n: s for n, s in modules.items() if n.endswith("w1")}, target_modules=["w1"])
    check_refused(model, tmp_path, r"cannot be converted.*without also targeting w3")


#: The place of the text model in transformers 4, and its place in a text model alone.
FORMER, ALONE = "language_model.model.", "model."


@pytest.fixture
def llava() -> Any:
    sight = {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
    text, vision = LlamaConfig(**SIZES), CLIPVisionConfig(**VISION, **sight)
    config = LlavaConfig(text_config=text, vision_config=vision, image_token_index=250)
    torch.manual_seed(0)
    base = LlavaForConditionalGeneration(config).eval()
    for parameter in base.parameters():  # makes rows far from uniform
        if parameter.ndim > 1:
            parameter.data.normal_(0, 0.15)
    return base.to(DEVICE)


@pytest.mark.parametrize(
    ("place", "settings", "adapted"),
    [
        (FORMER, {"target_modules": r".*\.q_proj"}, [0, 1]),
        (ALONE, {"target_modules": r".*\.1\..*\.q_proj"}, [1]),
        (FORMER, {"target_modules": ["q_proj"], "exclude_modules": r".*(vision|\.1\.).*"}, [0]),
        (ALONE, {"target_modules": ["q_proj"], "exclude_modules": r".*(vision|\.1\.).*"}, [0]),
    ],
)
def test_adapter_of_a_text_model_is_applied_inside_a_multimodal_model(
    llava: Any, place: str, settings: dict[str, Any], adapted: list[int], tmp_path: Path
) -> None:
    names = [f"layers.{layer}.self_attn.q_proj" for layer in adapted]
    changes = write(tmp_path, {f"{place}{n}": (32, 32) for n in names}, **settings)
    merged = copy.deepcopy(llava)
    with torch.no_grad():
        for name, change in changes.items():
            inner = merged.model.language_model.get_submodule(name.removeprefix(place))
            inner.weight += change
    check(llava, tmp_path, merged)


@pytest.mark.parametrize(
    ("place", "targets"),
    [
        (FORMER, ["self_attn.q_proj"]),
        (FORMER, r".*language_model.*q_proj|model\..*q_proj"),
        (ALONE, r".*language_model.*q_proj|model\..*q_proj"),
        (ALONE, "all-linear"),
    ],
)
def test_adapter_file_without_a_layer_of_the_text_model_is_rejected(
    llava: Any, place: str, targets: Any, tmp_path: Path
) -> None:
    write(tmp_path, {f"{place}layers.0.self_attn.q_proj": (32, 32)}, target_modules=targets)
    check_refused(llava, tmp_path, r"lacks the matrices of model\..*q_proj")


def test_adapter_of_another_model_is_rejected(tiny: str, tmp_path: Path) -> None:
    write(tmp_path, {"transformer.h.0.attn.c_attn": (32, 96)}, target_modules=["c_attn"])
    base = AutoModelForCausalLM.from_pretrained(tiny)
    check_refused(base, tmp_path, r"made for another model: it adapts transformer")
