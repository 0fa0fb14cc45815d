"""LoRA: folders of mlx-lm and of PEFT give the rows that mlx-lm and PEFT give, each in its row of a
batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm import convert
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from mlx_lm.utils import load_model
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, InvalidAdapterError, Query
from genlm.mlx import AsyncMlxLM
from genlm.mlx.adapters import read_folder
from genlm.mlx.loading import amended, load
from tests.adapter_kinds import KINDS, Kind, make_adapter
from tests.adapter_outcomes import make_case, outcome
from tests.adapter_table import check_refused, strangers, tabled

Folders = Callable[[str], Path]

CONTEXT = (5, 6, 7, 8)


def mlx_model(folder: Path) -> Any:
    return load_model(
        folder, model_config=amended(json.loads((folder / "config.json").read_text()))
    )[0]


def peft_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    return Path(make_adapter(Kind("", settings), str(model), folder))


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
    (base,) = engine.logprobs([Query(CONTEXT)])
    adapters = [
        Adapter(path.name, str(path), version) for version, path in enumerate(paths, start=1)
    ]
    for adapter in adapters:
        assert engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    queries = [
        Query(CONTEXT, adapters[1]),
        Query(CONTEXT),
        Query(CONTEXT, adapters[0]),
        Query(CONTEXT, adapters[2]),
    ]
    rows = engine.logprobs(queries)
    for row, expected in zip(
        rows, [references[1], base, references[0], references[2]], strict=True
    ):
        assert torch.allclose(row, expected, atol=1e-3)
    assert all((rows[at] - base).abs().max() > 1e-2 for at in (0, 2, 3))
    colds = [engine.logprobs([Query(CONTEXT, each.adapter, cold=True)])[0] for each in queries]
    assert torch.allclose(rows, torch.stack(colds), atol=1e-4)

    engine.genlm_remove_lora(adapters[0])
    longer = (*CONTEXT, 9)
    kept = engine.logprobs([Query(longer, adapters[1]), Query(longer)])
    fresh = load(str(folder), {}).logprobs([Query(longer)])[0]
    assert torch.allclose(kept[1], fresh, atol=1e-4)
    assert (kept[0] - kept[1]).abs().max() > 1e-2


def test_adapters_of_a_quantized_model(folders: Folders, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    convert(str(folders("llama")), str(quantized), quantize=True, q_group_size=32, q_bits=8)
    path = mlx_adapter(folders("llama"), tmp_path / "mlx")
    engine = load(str(quantized), {})
    adapter = Adapter("mlx", str(path), 1)
    engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    assert torch.allclose(
        engine.logprobs([Query(CONTEXT, adapter)])[0],
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


@pytest.mark.parametrize(
    ("place", "message"),
    [("self_attn.cross", "nothing"), ("input_layernorm", "RMSNorm")],
)
def test_weights_where_the_model_has_no_linear_layer(
    folders: Folders, tmp_path: Path, place: str, message: str
) -> None:
    folder = folders("llama")
    path = peft_adapter(folder, tmp_path / "adapter")
    changed_weights(
        lambda tensors: {
            name.replace("self_attn.q_proj", place): one for name, one in tensors.items()
        }
    )(path)
    engine = load(str(folder), {})
    before = engine.logprobs([Query(CONTEXT)])
    adapter = Adapter("bad", str(path), 1)
    with pytest.raises(
        InvalidAdapterError, match=f"where the model has {message}; only linear layers"
    ):
        engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    engine.genlm_clear_kv_cache()
    assert torch.equal(engine.logprobs([Query(CONTEXT)]), before)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_kinds_of_mlx_lm_that_are_refused(folders: Folders, tmp_path: Path, kind: str) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    changed_config(fine_tune_type=kind)(path)
    with pytest.raises(
        InvalidAdapterError, match=f"fine_tune_type='{kind}'; only 'lora' is applied"
    ):
        read_folder(str(path))


LAYER = "model.layers.1.self_attn.k_proj"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({f"{LAYER}.lora_a": None}, f"only one of the two matrices of {LAYER}"),
        ({f"{LAYER}.lora_a": mx.ones((32, 5))}, "cannot be multiplied"),
        ({f"{LAYER}.lora_b": mx.ones((2,))}, "cannot be multiplied"),
        ({"model.norm.weight": mx.ones((32,))}, "has model.norm.weight where LoRA weights"),
        ({f"{LAYER}.lora_a": mx.full((32, 4), float("nan"))}, f"NaN .* numbers in {LAYER}.lora_a"),
    ],
)
def test_weights_of_mlx_lm_that_are_refused(
    folders: Folders, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    file = str(path / "adapters.safetensors")
    weights = {**mx.load(file), **changed}
    mx.eval([one for one in weights.values() if one is not None])  # before the file changes
    mx.save_safetensors(file, {name: one for name, one in weights.items() if one is not None})
    with pytest.raises(InvalidAdapterError, match=message):
        read_folder(str(path))


@pytest.mark.parametrize(("depth", "lacks"), [(1, False), (2, False), (3, True), (-1, True)])
def test_blocks_that_the_file_of_mlx_lm_lacks(
    folders: Folders, tmp_path: Path, depth: int, lacks: bool
) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    settings = json.loads((path / "adapter_config.json").read_text()) | {"num_layers": depth}
    (path / "adapter_config.json").write_text(json.dumps(settings))
    engine, adapter = load(str(folders("llama")), {}), Adapter("a", str(path), 1)
    message = rf"lacks the matrices of model\.layers\.0\..*num_layers={depth}"
    with pytest.raises(InvalidAdapterError, match=message) if lacks else nullcontext():
        assert engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_that_is_no_adapter(folders: Folders, tmp_path: Path, missing: str) -> None:
    path = peft_adapter(folders("llama"), tmp_path / "adapter")
    (path / missing).unlink()
    with pytest.raises(InvalidAdapterError, match=missing):
        load(str(folders("llama")), {}).genlm_read_lora(Adapter("bad", str(path), 1))


def test_adapters_of_other_models(folders: Folders, tmp_path: Path) -> None:
    with AsyncMlxLM.from_name(str(folders("llama")), cache_size=0) as lm:
        check_refused(lm, strangers(str(folders("llama")), tmp_path))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_that_peft_saves(folders: Folders, tmp_path: Path, kind: Kind) -> None:
    folder = str(folders("llama"))
    with AsyncMlxLM.from_name(folder, cache_size=0) as lm:
        found = outcome(lm, make_case(kind, folder, tmp_path), 1e-3)
    assert found == tabled(kind, "mlx", found)


def test_an_adapter_in_bfloat16_is_scaled_in_float32(folders: Folders, tmp_path: Path) -> None:
    folder = folders("llama")
    path = peft_adapter(folder, tmp_path / "adapter", r=3, lora_alpha=7)
    changed_weights(lambda tensors: {name: one.bfloat16() for name, one in tensors.items()})(path)
    engine = load(str(folder), {})
    adapter = Adapter("a", str(path), 1)
    engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    (row,) = engine.logprobs([Query(CONTEXT, adapter)])
    torch.testing.assert_close(row, peft_row(folder, path), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "targets", ["q_proj k_proj v_proj o_proj", "gate_proj down_proj", "in_proj", "lm_head"]
)
def test_falcon_h1(folders: Folders, tmp_path: Path, targets: str) -> None:
    """Its multipliers are in the weights here, and go into the adapter's too."""
    folder = folders("falcon_h1")
    path = peft_adapter(folder, tmp_path / "adapter", target_modules=targets.split())
    engine = load(str(folder), {})
    adapter = Adapter("a", str(path), 1)
    engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    row, base = engine.logprobs([Query(CONTEXT, adapter), Query(CONTEXT)])
    torch.testing.assert_close(row, peft_row(folder, path), atol=1e-3, rtol=0)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([CONTEXT]))
    torch.testing.assert_close(base, expected.logits[0, -1].log_softmax(-1), atol=1e-3, rtol=0)
    assert (row - base).abs().max() > 1e-2


def test_an_adapter_that_gives_nan_harms_nobody_after_it(folders: Folders, tmp_path: Path) -> None:
    """Its numbers are finite and overflow. Rows take the places of its rows; and it is answered,
    also in chunks of which none can be kept."""
    peft_adapter(folders("llama"), tmp_path / "nan", target_modules=["k_proj", "v_proj"])
    weights = load_file(tmp_path / "nan" / "adapter_model.safetensors")
    weights = {name: torch.full_like(one, 3e38) for name, one in weights.items()}
    save_file(weights, tmp_path / "nan" / "adapter_model.safetensors", {"format": "pt"})
    engine = load(str(folders("llama")), {"prefill_step_size": 64})
    adapter = Adapter("nan", str(tmp_path / "nan"), 1)
    engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    broken = [Query((token, *range(40)), adapter) for token in range(8)]
    assert engine.logprobs(broken).isnan().all()
    long = Query((*range(200),), adapter)
    answers: list[Any] = engine.genlm_step([long], [])
    for _ in range(4):
        answers += engine.genlm_step([], [])
    assert [answer.request for answer in answers] == [long]
    engine.genlm_remove_lora(adapter)
    contexts = [Query((token, *range(9 + 3 * token))) for token in range(8)]
    cold = engine.logprobs([Query(one.token_ids, cold=True) for one in contexts])
    assert (engine.logprobs(contexts) - cold).abs().max() < 1e-3
