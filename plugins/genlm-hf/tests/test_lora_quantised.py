"""LoRA on quantised weights: the base model is unchanged, or the adapter is rejected."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from genlm.core import Adapter, EngineDeadError, InvalidAdapterError, Query, UnsupportedError
from genlm.hf.engine import HFEngine
from genlm.hf.loading import load_pretrained
from genlm.hf.options import HFOptions
from tests.adapter_kinds import Kind, make_adapter
from tests.engines import add_lora, rows_of

from .quantised import dequantised

peft = pytest.importorskip("peft", reason="LoRA needs peft")

CONTEXT = (1, 2, 3, 4, 5)
QUANTISED = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True},
    "4 bits, scales too": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}


def row(engine: HFEngine, adapter: Adapter | None = None) -> torch.Tensor:
    return rows_of(engine, [Query(CONTEXT, adapter, cold=True)])[0]


def quantised(folder: str, how: str) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    options = HFOptions.parse({"bitsandbytes_opts": QUANTISED[how]})
    return load_pretrained(folder, options)[0]


@pytest.mark.parametrize("how", QUANTISED)
def test_adapters_leave_rows_of_the_quantised_base_model_unchanged(
    how: str, tiny: str, lora_folders: dict[str, str]
) -> None:
    model = quantised(tiny, how)
    plain = dequantised(model, tiny)
    engine = HFEngine(model, None)
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
            # The tolerance for activations rounded to 8 bits or to bfloat16.
            torch.testing.assert_close(given, logits.log_softmax(-1), atol=0.2, rtol=0)
        for adapter in adapters:
            engine.genlm_remove_lora(adapter)
            assert torch.equal(row(engine), base)


@pytest.mark.parametrize(
    ("how", "settings", "why"),
    [
        ("8 bits", {"use_dora": True}, "DoRA.*quantised"),
        ("4 bits", {"modules_to_save": ["down_proj"]}, "trained whole.*quantised"),
        # The name is the end of another.
        ("8 bits", {"modules_to_save": ["n_proj"]}, "trained whole.*quantised"),
    ],
)
def test_unsupported_adapters_of_quantised_weights_are_rejected(
    how: str, settings: dict[str, Any], why: str, tiny: str, tmp_path: Path
) -> None:
    folder = make_adapter(Kind("", settings), tiny, tmp_path)
    check_refused(quantised(tiny, how), folder, UnsupportedError, why)


def test_missing_saved_module_is_reported_before_weights_are_checked(
    tiny: str, lora_folders: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(lora_folders["a"], tmp_path, dirs_exist_ok=True)
    config = tmp_path / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"modules_to_save": ["up_proj"]}))
    said = "lacks the weights of up_proj, which modules_to"
    check_refused(quantised(tiny, "4 bits"), str(tmp_path), InvalidAdapterError, said)


def check_refused(model: Any, folder: str, error: type[Exception], said: str) -> None:
    """Check that an adapter is rejected, and that the base model is unchanged."""
    engine = HFEngine(model, None)
    base = row(engine)
    with pytest.raises(error, match=said):
        add_lora(engine, Adapter("a", folder, 1))
    assert torch.equal(row(engine), base)


class Unpacks(torch.nn.Linear):
    """Changes its weights in place for a state dict, as bitsandbytes' 4-bit layers do on a CPU with
    AVX512-BF16."""

    def _save_to_state_dict(self, *arguments: Any) -> None:
        with torch.no_grad():
            self.weight.mul_(1.1)
        super()._save_to_state_dict(*arguments)


class ChangesWhileFrozen(torch.nn.Linear):
    """A layer whose result changes while its weights are frozen, as PEFT freezes them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if self.weight.requires_grad else 1.1)


def spoiled(module: Any, *_: Any) -> None:
    with torch.no_grad():
        module.weight.mul_(1.1)


def with_layer(folder: str, kind: type[torch.nn.Linear]) -> Any:
    """A model with one layer of another class."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    model.model.layers[0].mlp.up_proj.__class__ = kind
    return model


def test_adapter_loads_without_state_dict_changing_a_layer(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    engine = HFEngine(with_layer(tiny, Unpacks), None)
    base = row(engine)
    adapter = Adapter("a", lora_folders["a"], 1)
    add_lora(engine, adapter)
    assert torch.equal(row(engine), base)
    engine.genlm_remove_lora(adapter)
    assert torch.equal(row(engine), base)


def test_layer_that_changes_beside_an_adapter_is_rejected(
    tiny: str, lora_folders: dict[str, str]
) -> None:
    said = "changes the rows of this base model"
    check_refused(with_layer(tiny, ChangesWhileFrozen), lora_folders["a"], UnsupportedError, said)


def test_layer_that_stays_changed_ends_the_engine(tiny: str, lora_folders: dict[str, str]) -> None:
    model = with_layer(tiny, torch.nn.Linear)
    model.model.layers[0].mlp.up_proj.register_load_state_dict_pre_hook(spoiled)
    engine = HFEngine(model, None)
    with pytest.raises(EngineDeadError, match="load the model again"):
        add_lora(engine, Adapter("a", lora_folders["a"], 1))
