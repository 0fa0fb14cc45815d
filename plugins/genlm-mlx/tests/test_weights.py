"""Weights that models of mlx-lm drop as they rename those of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Ernie4_5_MoeConfig

from genlm.core import Query
from genlm.core.errors import EngineError
from genlm.mlx import weights
from genlm.mlx.loading import load
from tests.adapter_outcomes import reference_rows
from tools.tiny import write_variant

from .conftest import HEADS, SIZES
from .test_settings import Saved
from .watched import Folders


class Model:
    """Renames, joins, turns and drops weights."""

    def __init__(self, given: Any) -> None:
        pass

    def sanitize(self, held: dict[str, mx.array]) -> dict[str, mx.array]:
        return {
            "same": held["same"],
            "renamed": held.pop("called otherwise"),
            "joined": mx.stack([held[f"experts.{n}"] for n in range(2)]),
            "turned": held["convolution"].T * 0.5,
            "packed": mx.concatenate([held["codes"], held["codes"]]),
        }


def test_unconverted_tensors_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "_get_classes", lambda config: (Model, dict))
    dropped: dict[str, tuple[int, ...]] = {}
    make, arguments = weights.noting(dropped)({})
    model = make(arguments())
    names = ["same", "called otherwise", "convolution", *(f"experts.{n}" for n in range(4))]
    held = {name: mx.ones((2, 3)) for name in names}
    held |= {"zeros": mx.zeros(4), "bias": mx.array([0.0, 1.0]), "codes": mx.ones(2, mx.uint32)}
    assert [*model.sanitize(dict(held))] == ["same", "renamed", "joined", "turned", "packed"]
    assert dropped == {"bias": (2,), "experts.2": (2, 3), "experts.3": (2, 3)}
    dropped.clear()
    model.sanitize(held)
    assert not dropped, "weights that a program loads later are its own"


def test_model_that_drops_needed_tensors_is_rejected(saved: Saved) -> None:
    """A bias of the router: zeros in a new model, and not in a trained one."""
    moe = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}
    folder = saved(Ernie4_5_MoeConfig(**SIZES, **HEADS, **moe, pad_token_id=0))
    file = Path(folder, "model.safetensors")
    held = load_file(file)
    biases = sorted(name for name in held if name.endswith("e_score_correction_bias"))
    save_file(held | {name: torch.rand(held[name].shape) for name in biases}, file)
    said = rf"has {biases[0]} \({len(biases)} weights .*mlx-lm leaves them out of ernie4"
    with pytest.raises(EngineError, match=said):
        load(folder, {})


NO_PLACE = {
    "model.layers.1.mlp.up_proj.bias": HEADS["intermediate_size"],
    "model.layers.1.self_attn.q_norm.weight": HEADS["head_dim"],
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_weight_without_a_place_in_its_layer_is_rejected(
    folders: Folders, tmp_path: Path, name: str
) -> None:
    """Also by hf, so that the remedy is no other backend."""
    folder = write_variant(
        str(folders("llama")), tmp_path / "it", {name: torch.ones(NO_PLACE[name])}
    )
    said = rf"has {name} \(1 such .* LlamaForCausalLM has no place .*correct config\.json"
    with pytest.raises(EngineError, match=said):
        load(folder, {})


SCALING = {"rope_type": "linear", "factor": 4.0}


def test_rotary_settings_under_both_names_are_rejected_if_one_is_dropped(
    folders: Folders, tmp_path: Path
) -> None:
    folder = str(folders("llama"))
    dropped = write_variant(folder, tmp_path / "dropped", rope_scaling=SCALING)
    with pytest.raises(EngineError, match=r"rope_scaling: .* drops rope_theta=500\.0 .*write what"):
        load(dropped, {})
    whole = {**SCALING, "rope_theta": 500.0}
    served = write_variant(folder, tmp_path / "served", rope_scaling=whole)
    ids = (5, 9, 13, 66, 200)
    (expected,) = reference_rows(served, None, [ids])
    (plain,) = reference_rows(folder, None, [ids])
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(
        load(served, {}).logprobs([Query(ids)])[0], expected, atol=2e-3, rtol=0
    )
