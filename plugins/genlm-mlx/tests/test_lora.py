"""LoRA: folders of mlx-lm and of PEFT give the rows that mlx-lm and PEFT give, each in its
sequence of a batch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx.utils import tree_flatten
from mlx_lm import convert
from mlx_lm.tuner.utils import linear_to_lora_layers, load_adapters
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, InvalidAdapterError, Query
from genlm.mlx import AsyncMlxLM
from genlm.mlx.adapters import read_folder
from genlm.mlx.engine import MlxEngine
from genlm.mlx.loading import load
from genlm.mlx.store import Store
from tests.adapter_kinds import KINDS, Kind, make_adapter
from tests.adapter_outcomes import make_case, outcome
from tests.adapter_table import check_refused, strangers, tabled

from .watched import Folders, by_mlx_lm

CONTEXT = (5, 6, 7, 8)
VERSIONS = itertools.count(1)


@pytest.fixture(scope="module")
def engine(folders: Folders) -> MlxEngine:
    """Of the tiny llama."""
    return load(str(folders("llama")), {})


@pytest.fixture(scope="module")
def lm(folders: Folders) -> Iterator[AsyncMlxLM]:
    with AsyncMlxLM.from_name(str(folders("llama")), cache_size=0) as lm:
        yield lm


def added(engine: MlxEngine, path: Path) -> Adapter:
    adapter = Adapter(path.name, str(path), next(VERSIONS))
    assert engine.genlm_add_lora(adapter, engine.genlm_read_lora(adapter))
    return adapter


def peft_adapter(model: Path, folder: Path, **settings: Any) -> Path:
    return Path(make_adapter(Kind("", settings), str(model), folder))


def mlx_adapter(model: Path, folder: Path) -> Path:
    """As ``mlx_lm.lora`` writes it: two of three layers, dropout among the settings."""
    config = {"rank": 4, "scale": 3.0, "dropout": 0.5, "keys": ["self_attn.k_proj", "mlp.up_proj"]}
    adapted = by_mlx_lm(model)
    adapted.freeze()
    linear_to_lora_layers(adapted, 2, config)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(one.shape) * 0.3
        for name, one in tree_flatten(adapted.trainable_parameters())
    }
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    settings = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def peft_row(model: Path, adapter: Path) -> torch.Tensor:
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    with torch.no_grad():
        return adapted(torch.tensor([CONTEXT])).logits[0, -1].log_softmax(-1)


def mlx_row(model: Path, adapter: Path | None = None) -> torch.Tensor:
    adapted = by_mlx_lm(model)
    if adapter is not None:
        adapted = load_adapters(adapted, str(adapter))
        adapted.eval()  # mlx-lm leaves dropout switched on
    return torch.tensor(adapted(mx.array([CONTEXT]))[0, -1].tolist()).log_softmax(-1)


def test_adapters_of_both_kinds_mix_in_one_batch(
    folders: Folders, engine: MlxEngine, tmp_path: Path
) -> None:
    folder = folders("llama")
    peft = peft_adapter(folder, tmp_path / "peft")
    mlx = mlx_adapter(folder, tmp_path / "mlx")
    adapters = [added(engine, mlx), None, added(engine, peft)]
    rows = engine.logprobs([Query(CONTEXT, adapter) for adapter in adapters])
    expected = torch.stack([mlx_row(folder, mlx), mlx_row(folder), peft_row(folder, peft)])
    torch.testing.assert_close(rows, expected, atol=1e-3, rtol=0)
    for at in (0, 2):
        assert (rows[at] - rows[1]).abs().max() > 1e-2


def test_adapters_of_a_quantized_model(folders: Folders, tmp_path: Path) -> None:
    quantized = tmp_path / "quantized"
    convert(str(folders("llama")), str(quantized), quantize=True, q_group_size=32, q_bits=8)
    path = mlx_adapter(folders("llama"), tmp_path / "mlx")
    engine = load(str(quantized), {})
    assert isinstance(engine.store, Store)
    rows = engine.logprobs([Query(CONTEXT, added(engine, path)), Query(CONTEXT)])
    expected = torch.stack([mlx_row(quantized, path), mlx_row(quantized)])
    torch.testing.assert_close(rows, expected, atol=1e-3, rtol=0)


def change_config(folder: Path, **changes: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[str, torch.Tensor], Any]) -> None:
    """``change`` gives the new name and tensor of each."""
    file = folder / "adapter_model.safetensors"
    changed = [change(name, tensor) for name, tensor in load_file(file).items()]
    save_file(dict(changed), file)


def test_adapter_for_a_nonlinear_layer_is_rejected(
    folders: Folders, engine: MlxEngine, tmp_path: Path
) -> None:
    path = peft_adapter(folders("llama"), tmp_path / "adapter")
    change_weights(
        path, lambda name, one: (name.replace("self_attn.q_proj", "input_layernorm"), one)
    )
    before = engine.logprobs([Query(CONTEXT, cold=True)])
    with pytest.raises(InvalidAdapterError, match="the model has RMSNorm; only linear layers"):
        added(engine, path)
    assert torch.equal(engine.logprobs([Query(CONTEXT, cold=True)]), before)


@pytest.mark.parametrize("kind", ["dora", "full"])
def test_unsupported_kinds_of_mlx_lm_adapters_are_rejected(
    folders: Folders, tmp_path: Path, kind: str
) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    change_config(path, fine_tune_type=kind)
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
def test_invalid_weights_of_mlx_lm_adapters_are_rejected(
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
def test_adapter_of_mlx_lm_without_all_blocks_is_rejected(
    folders: Folders, engine: MlxEngine, tmp_path: Path, depth: int, lacks: bool
) -> None:
    path = mlx_adapter(folders("llama"), tmp_path / "adapter")
    change_config(path, num_layers=depth)
    message = rf"lacks the matrices of model\.layers\.0\..*num_layers={depth}"
    with pytest.raises(InvalidAdapterError, match=message) if lacks else nullcontext():
        added(engine, path)


def test_adapters_of_other_models_are_rejected(
    folders: Folders, lm: AsyncMlxLM, tmp_path: Path
) -> None:
    check_refused(lm, strangers(str(folders("llama")), tmp_path))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_kind_of_adapter_has_its_outcome_of_the_table(
    folders: Folders, lm: AsyncMlxLM, tmp_path: Path, kind: Kind
) -> None:
    found = outcome(lm, make_case(kind, str(folders("llama")), tmp_path), 1e-3)
    assert found == tabled(kind, "mlx", found)


def test_an_adapter_in_bfloat16_is_scaled_in_float32(
    folders: Folders, engine: MlxEngine, tmp_path: Path
) -> None:
    path = peft_adapter(folders("llama"), tmp_path / "adapter", r=3, lora_alpha=7)
    change_weights(path, lambda name, one: (name, one.bfloat16()))
    (row,) = engine.logprobs([Query(CONTEXT, added(engine, path))])
    torch.testing.assert_close(row, peft_row(folders("llama"), path), atol=1e-4, rtol=0)


def test_multipliers_of_falcon_h1_apply_to_adapters(folders: Folders, tmp_path: Path) -> None:
    """Its multipliers are in the weights here, and go into the adapter's too."""
    folder = folders("falcon_h1")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "down_proj", "in_proj"]
    path = peft_adapter(folder, tmp_path / "adapter", target_modules=[*targets, "lm_head"])
    engine = load(str(folder), {})
    (row,) = engine.logprobs([Query(CONTEXT, added(engine, path))])
    torch.testing.assert_close(row, peft_row(folder, path), atol=1e-3, rtol=0)


def test_nan_of_an_adapter_affects_no_later_row(folders: Folders, tmp_path: Path) -> None:
    """The adapter's weights are finite, but its rows overflow. Later sequences take the places of
    its sequences. Its own requests are answered, even in chunks whose state cannot be kept."""
    path = peft_adapter(folders("llama"), tmp_path / "nan", target_modules=["k_proj", "v_proj"])
    change_weights(path, lambda name, one: (name, torch.full_like(one, 3e38)))
    engine = load(str(folders("llama")), {"prefill_step_size": 64})
    adapter = added(engine, path)
    broken = [Query((token, *range(40)), adapter) for token in range(8)]
    assert engine.logprobs(broken).isnan().all()
    long = Query((*range(200),), adapter)
    answers: list[Any] = engine.genlm_step([long], [], engine.vocab_size)
    for _ in range(4):
        answers += engine.genlm_step([], [], engine.vocab_size)
    assert [answer.request for answer in answers] == [long]
    engine.genlm_remove_lora(adapter)
    contexts = [Query((token, *range(9 + 3 * token))) for token in range(8)]
    cold = engine.logprobs([Query(one.token_ids, cold=True) for one in contexts])
    assert (engine.logprobs(contexts) - cold).abs().max() < 1e-3
