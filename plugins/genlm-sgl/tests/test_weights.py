"""The use that models make of the weights that SGLang's loaders give them. Rows are not compared
here, because they are not compared for large folders either."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from structlog.testing import capture_logs
from transformers import LlamaConfig, LlamaForCausalLM

from genlm.core import EngineError, Query
from genlm.kit.loads import KEPT_BYTES
from genlm.sgl.loading import load
from tests.adapter_outcomes import reference_rows
from tools.tiny import write_tokenizer, write_variant

SMALL = {"max_total_tokens": 1024}

THREADS = {
    "model_loader_extra_config": json.dumps({"enable_multithread_load": True, "num_threads": 2})
}
FORMATS = {
    "one after the other": {},
    "by threads": THREADS,
    "pickled": {"load_format": "pt"},
    "pickled, by threads": {"load_format": "pt", **THREADS},
    "pickled, as NumPy's": {"load_format": "npcache"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama with biases that SGLang's class has not, two of them large; in every format."""
    made = tmp_path_factory.mktemp("biases")
    wide = KEPT_BYTES // 4 + 64
    shape = {"hidden_size": 16, "intermediate_size": wide, "num_hidden_layers": 1}
    config = LlamaConfig(**shape, vocab_size=257, num_attention_heads=4, mlp_bias=True)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
    model.save_pretrained(made)
    for name in ("model.pt", "pytorch_model.bin"):
        torch.save(load_file(made / "model.safetensors"), made / name)
    write_tokenizer(made, "<end>")
    return str(made)


@pytest.mark.parametrize("how", FORMATS)
def test_every_loader_reports_ignored_weights(how: str, folder: str) -> None:
    said = r"has model\.layers\.0\.mlp\.\w+_proj\.bias \(3 .*out of llama; .*backend='hf'"
    with pytest.raises(EngineError, match=said):
        load(folder, {"engine_opts": SMALL | FORMATS[how]})


@pytest.mark.parametrize("load_format", ["sharded_state", "dummy"])
def test_a_loader_that_cannot_be_watched_is_named(
    load_format: str, tiny: str, tmp_path: Path
) -> None:
    """It writes weights past the model; random ones are no checkpoint's."""
    from sglang.srt.model_loader.loader import ShardedStateLoader

    engine = load(tiny, {"engine_opts": SMALL})
    try:
        ShardedStateLoader.save_model(engine.model, str(tmp_path))
        expected = engine.evaluate_alone(Query((1, 2, 3)))
    finally:
        engine.genlm_close()
    for file in Path(tiny).iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with capture_logs() as logs:
        engine = load(str(tmp_path), {"engine_opts": SMALL | {"load_format": load_format}})
    named = [log for log in logs if log["event"] == "weights.unwatched"]
    try:
        if load_format == "dummy":
            assert not named
        else:
            (warning,) = named
            assert (warning["log_level"], warning["load_format"]) == ("warning", load_format)
            torch.testing.assert_close(engine.evaluate_alone(Query((1, 2, 3))), expected)
    finally:
        engine.genlm_close()


NO_PLACE = {
    "model.layers.1.mlp.up_proj.bias": 96,
    "model.layers.1.self_attn.q_norm.weight": 16,
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_weight_without_a_place_in_its_layer_is_rejected(
    name: str, tiny: str, tmp_path: Path
) -> None:
    """Also by hf, so that the remedy is no other backend."""
    folder = write_variant(tiny, tmp_path / "it", {name: torch.ones(NO_PLACE[name])})
    said = rf"has {name} \(1 such .* LlamaForCausalLM has no place .*correct config\.json"
    with pytest.raises(EngineError, match=said):
        load(folder, {"engine_opts": SMALL})


SCALING = {"rope_type": "linear", "factor": 4.0}


def test_rotary_settings_under_both_names_are_rejected_if_one_is_dropped(
    tiny: str, tmp_path: Path
) -> None:
    written = {"rope_type": "default", "rope_theta": 777.0}
    both = {"rope_parameters": written, "rope_scaling": SCALING}
    dropped = write_variant(tiny, tmp_path / "dropped", **both)
    with pytest.raises(EngineError, match=r"rope_scaling: .* drops rope_theta=777\.0 .*write what"):
        load(dropped, {"engine_opts": SMALL})
    both["rope_scaling"] = {**SCALING, "rope_theta": 777.0}
    served = write_variant(tiny, tmp_path / "served", **both)
    ids = (5, 9, 13, 66, 200)
    expected, plain = (reference_rows(each, None, [ids])[0] for each in (served, tiny))
    assert (expected - plain).abs().max() > 0.1
    engine = load(served, {"engine_opts": SMALL})
    try:
        row = engine.evaluate_alone(Query(ids))
    finally:
        engine.genlm_close()
    torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)
