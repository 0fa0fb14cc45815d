"""LoRA on quantised weights: the base model stays as it is, or the adapter is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, EngineDeadError, InvalidAdapterError, Query, UnsupportedError
from genlm.hf.engine import HFEngine
from genlm.hf.loading import load_pretrained
from genlm.hf.options import HFOptions
from tests.engines import add_lora, rows_of

peft = pytest.importorskip("peft", reason="LoRA needs peft")

CONTEXT = (1, 2, 3, 4, 5)
QUANTISED = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True},
    "4 bits, scales too": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}


def row(engine: HFEngine, adapter: Adapter | None = None) -> torch.Tensor:
    return rows_of(engine, [Query(CONTEXT, adapter, cold=True)])[0]


@pytest.fixture(params=QUANTISED)
def quantised(request: pytest.FixtureRequest, tiny: str) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = HFOptions.parse({"bitsandbytes_opts": QUANTISED[request.param]})
    return load_pretrained(tiny, options)[0]


def dequantised(model: Any, folder: str) -> Any:
    """A plain model with the values of a quantised one that has not computed anything yet."""
    import bitsandbytes as bnb

    plain: Any = AutoModelForCausalLM.from_pretrained(folder)
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, bnb.nn.Linear8bitLt):
            values = bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)
        elif isinstance(module, bnb.nn.Linear4bit):
            values = bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
        else:
            continue
        with torch.no_grad():
            plain.get_submodule(name).weight.copy_(values)
    return plain


def test_rows_with_adapters_and_without(
    quantised: Any, tiny: str, lora_folders: dict[str, str]
) -> None:
    plain = dequantised(quantised, tiny)
    engine = HFEngine(quantised, None)
    base = row(engine)
    adapters = [Adapter(name, folder, at) for at, (name, folder) in enumerate(lora_folders.items())]
    for _ in range(2):
        for adapter in adapters:
            add_lora(engine, adapter)
            assert torch.equal(row(engine), base)
        for adapter in adapters:
            given = row(engine, adapter)
            expected = peft.PeftModel.from_pretrained(plain, adapter.path).eval()
            with torch.no_grad():
                logits = expected(input_ids=torch.tensor([CONTEXT]), use_cache=False).logits[0, -1]
            plain = expected.unload()
            assert (given - base).abs().max() > 1.0
            # Rounding of activations, to 8 bits or to bfloat16.
            torch.testing.assert_close(given, logits.log_softmax(-1), atol=0.2, rtol=0)
        for adapter in adapters:
            engine.genlm_remove_lora(adapter)
            assert torch.equal(row(engine), base)


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"modules_to_save": ["down_proj"]}, "trained whole"),
        ({"modules_to_save": ["n_proj"]}, "trained whole"),  # the end of the same name
    ],
)
def test_what_peft_cannot_apply_to_quantised_weights_is_refused(
    quantised: Any, tiny: str, kind: dict[str, Any], why: str, tmp_path: Path
) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], **kind)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), config).save_pretrained(
        tmp_path
    )
    engine = HFEngine(quantised, None)
    base = row(engine)
    with pytest.raises(UnsupportedError, match=f"{why}.*quantised"):
        add_lora(engine, Adapter("a", str(tmp_path), 1))
    assert torch.equal(row(engine), base)


def test_a_module_that_was_not_saved_is_missed_before_its_weights_are_looked_at(
    quantised: Any, lora_folders: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(lora_folders["a"], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["up_proj"]}))
    engine = HFEngine(quantised, None)
    base = row(engine)
    with pytest.raises(InvalidAdapterError, match="lacks the weights of up_proj, which modules_to"):
        add_lora(engine, Adapter("a", str(tmp_path), 1))
    assert torch.equal(row(engine), base)


class Unpacks(torch.nn.Linear):
    """Changes its weights in place for a state dict, as bitsandbytes' 4-bit layers do on a CPU with
    AVX512-BF16."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        with torch.no_grad():
            self.weight.mul_(1.1)
        super()._save_to_state_dict(*arguments)


class ChangesWhileFrozen(torch.nn.Linear):
    """Computes something else while its weights are frozen, which PEFT does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.weight.requires_grad else 1.1)


def spoiled(module: Any, *_: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(1.1)


@pytest.fixture
def with_layer(tiny: str) -> Callable[..., HFEngine]:
    """Makes an engine whose model has one layer of another class."""

    def make(kind: type[torch.nn.Linear], hook: Callable[..., None] | None = None) -> HFEngine:
        model: Any = AutoModelForCausalLM.from_pretrained(tiny)
        layer = model.model.layers[0].mlp.up_proj
        layer.__class__ = kind
        if hook is not None:
            layer.register_load_state_dict_pre_hook(hook)
        return HFEngine(model, None)

    return make


def test_a_layer_that_a_state_dict_would_change(
    with_layer: Callable[..., HFEngine], lora_folders: dict[str, str]
) -> None:
    engine = with_layer(Unpacks)
    base = row(engine)
    adapter = Adapter("a", lora_folders["a"], 1)
    add_lora(engine, adapter)
    assert torch.equal(row(engine), base)
    engine.genlm_remove_lora(adapter)
    assert torch.equal(row(engine), base)


def test_a_layer_that_is_another_beside_an_adapter(
    with_layer: Callable[..., HFEngine], lora_folders: dict[str, str]
) -> None:
    engine = with_layer(ChangesWhileFrozen)
    base = row(engine)
    with pytest.raises(UnsupportedError, match="changes the rows of this base model"):
        add_lora(engine, Adapter("a", lora_folders["a"], 1))
    assert torch.equal(row(engine), base)


def test_a_layer_that_stays_changed_is_the_end(
    with_layer: Callable[..., HFEngine], lora_folders: dict[str, str]
) -> None:
    engine = with_layer(torch.nn.Linear, hook=spoiled)
    with pytest.raises(EngineDeadError, match="load the model again"):
        add_lora(engine, Adapter("a", lora_folders["a"], 1))
