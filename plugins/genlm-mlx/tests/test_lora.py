"""LoRA: folders of mlx-lm and of PEFT give the rows that mlx-lm and PEFT give, each in its row of a
batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm import convert
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, Query
from genlm.core.errors import InvalidOptionError
from genlm.mlx.loading import amended, load

Folders = Callable[[str], Path]

CONTEXT = (5, 6, 7, 8)


def mlx_model(folder: Path) -> Any:
    return load_model(
        folder, model_config=amended(json.loads((folder / "config.json").read_text()))
    )[0]


def peft_adapter(model: Path, folder: Path, **changes: Any) -> Path:
    torch.manual_seed(3)
    config = {
        "r": 2,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "v_proj"],
        "init_lora_weights": False,
        **changes,
    }
    get_peft_model(
        AutoModelForCausalLM.from_pretrained(model), LoraConfig(**config)
    ).save_pretrained(folder)
    return folder


def mlx_adapter(model: Path, folder: Path, kind: str = "lora") -> Path:
    """As ``mlx_lm.lora`` writes it: two of three layers, dropout among the settings."""
    config = {"rank": 4, "scale": 3.0, "dropout": 0.5, "keys": ["self_attn.k_proj", "mlp.up_proj"]}
    adapted = mlx_model(model)
    adapted.freeze()
    linear_to_lora_layers(adapted, 2, config, use_dora=kind == "dora")
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(one.shape) * 0.3
        for name, one in tree_flatten(adapted.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    settings = {"fine_tune_type": kind, "num_layers": 2, "lora_parameters": config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def peft_row(model: Path, adapter: Path) -> torch.Tensor:
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    with torch.no_grad():
        return adapted(torch.tensor([CONTEXT])).logits[0, -1].log_softmax(-1)


def mlx_row(model: Path, adapter: Path) -> torch.Tensor:
    adapted = load_adapters(mlx_model(model), str(adapter))
    adapted.eval()
    return torch.tensor(adapted(mx.array([CONTEXT]))[0, -1].tolist()).log_softmax(-1)


def test_adapters_of_both_kinds_mix_in_one_batch(folders: Folders, tmp_path: Path) -> None:
    folder = folders("llama")
    paths = [
        peft_adapter(folder, tmp_path / "peft"),
        mlx_adapter(folder, tmp_path / "mlx"),
        peft_adapter(
            folder,
            tmp_path / "rslora",
            r=4,
            use_rslora=True,
            target_modules=["k_proj", "down_proj"],
        ),
    ]
    references = [peft_row(folder, paths[0]), mlx_row(folder, paths[1]), peft_row(folder, paths[2])]
    engine = load(str(folder), {})
    (base,) = engine.genlm_next_token_logprobs([Query(CONTEXT)])
    adapters = [
        Adapter(path.name, str(path), version) for version, path in enumerate(paths, start=1)
    ]
    for adapter in adapters:
        assert engine.genlm_add_lora(adapter)
    queries = [
        Query(CONTEXT, adapters[1]),
        Query(CONTEXT),
        Query(CONTEXT, adapters[0]),
        Query(CONTEXT, adapters[2]),
    ]
    rows = engine.genlm_next_token_logprobs(queries)
    for row, expected in zip(
        rows, [references[1], base, references[0], references[2]], strict=True
    ):
        assert torch.allclose(row, expected, atol=1e-3)
    assert all((rows[at] - base).abs().max() > 1e-2 for at in (0, 2, 3))
    colds = [
        engine.genlm_next_token_logprobs([Query(CONTEXT, each.adapter, cold=True)])[0]
        for each in queries
    ]
    assert torch.allclose(rows, torch.stack(colds), atol=1e-4)

    engine.genlm_remove_lora(adapters[0])
    longer = (*CONTEXT, 9)
    kept = engine.genlm_next_token_logprobs([Query(longer, adapters[1]), Query(longer)])
    fresh = load(str(folder), {}).genlm_next_token_logprobs([Query(longer)])[0]
    assert torch.allclose(kept[1], fresh, atol=1e-4)
    assert (kept[0] - kept[1]).abs().max() > 1e-2


def test_adapters_of_a_quantized_model(folders: Folders, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    convert(str(folders("llama")), str(quantized), quantize=True, q_group_size=32, q_bits=8)
    path = mlx_adapter(folders("llama"), tmp_path / "mlx")
    engine = load(str(quantized), {})
    adapter = Adapter("mlx", str(path), 1)
    engine.genlm_add_lora(adapter)
    assert torch.allclose(
        engine.genlm_next_token_logprobs([Query(CONTEXT, adapter)])[0],
        mlx_row(quantized, path),
        atol=1e-3,
    )


def changed_config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def changed_weights(
    change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "adapter_model.safetensors"
        save_file(change(load_file(file)), file)

    return apply


REFUSED = {
    "of another kind": (changed_config(peft_type="LOHA"), "has peft_type='LOHA'; only plain LoRA"),
    "DoRA": (changed_config(use_dora=True), "has use_dora=True; only plain LoRA"),
    "with a bias": (changed_config(bias="all"), "has bias='all'; only plain LoRA"),
    "with whole modules": (changed_config(modules_to_save=["lm_head"]), "only plain LoRA"),
    "with ranks by layer": (changed_config(rank_pattern={"q_proj": 4}), "only plain LoRA"),
    "of repeated layers": (changed_config(layer_replication=[[0, 2]]), "only plain LoRA"),
    "that waits for tokens": (changed_config(alora_invocation_tokens=[1]), "only plain LoRA"),
    "without a rank": (changed_config(r=None), "has r=None"),
    "for a wider model": (
        changed_weights(
            lambda tensors: {name: torch.cat([one, one], 1) for name, one in tensors.items()}
        ),
        "made for another model: at model.layers.0.self_attn.[qv]_proj it maps 64 to 32 features, "
        "the model 32 to",
    ),
    "of other layers": (
        changed_weights(
            lambda tensors: {
                name.replace("self_attn", "cross"): one for name, one in tensors.items()
            }
        ),
        "where the model has nothing; only linear layers",
    ),
    "with half a pair": (
        changed_weights(
            lambda tensors: {name: one for name, one in tensors.items() if "lora_A" in name}
        ),
        "has only one of the two matrices",
    ),
    "with other tensors": (
        changed_weights(lambda tensors: {**tensors, "base_model.model.extra": torch.ones(2)}),
        "where LoRA weights were expected",
    ),
    "without tensors": (changed_weights(lambda tensors: {}), "where LoRA weights were expected"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(folders: Folders, tmp_path: Path, case: str) -> None:
    spoil, message = REFUSED[case]
    folder = folders("llama")
    path = peft_adapter(folder, tmp_path / "adapter")
    spoil(path)
    engine = load(str(folder), {})
    before = engine.genlm_next_token_logprobs([Query(CONTEXT)])
    with pytest.raises(InvalidOptionError, match=message):
        engine.genlm_add_lora(Adapter("bad", str(path), 1))
    engine.genlm_clear_kv_cache()
    assert torch.equal(engine.genlm_next_token_logprobs([Query(CONTEXT)]), before)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_kinds_of_mlx_lm_that_are_refused(folders: Folders, tmp_path: Path, kind: str) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    changed_config(fine_tune_type=kind)(path)
    with pytest.raises(
        InvalidOptionError, match=f"fine_tune_type='{kind}'; only 'lora' is applied"
    ):
        load(str(folders("llama")), {}).genlm_add_lora(Adapter("bad", str(path), 1))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_is_no_adapter(folders: Folders, tmp_path: Path, missing: str) -> None:
    path = peft_adapter(folders("llama"), tmp_path / "adapter")
    (path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        load(str(folders("llama")), {}).genlm_add_lora(Adapter("bad", str(path), 1))
