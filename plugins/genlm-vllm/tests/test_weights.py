"""The use that models make of the weights that vLLM's loaders give them. Rows are not compared
here, because they are not compared for large folders either."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from vllm.model_executor import model_loader
from vllm.model_executor.model_loader import base_loader, runai_streamer_loader
from vllm.model_executor.model_loader.sharded_state_loader import ShardedStateLoader

from genlm.core import EngineError, Query
from genlm.kit.loads import KEPT_BYTES
from tests.adapter_outcomes import reference_rows
from tools.tiny import write_variant

from .driven import text

THREADS = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 2}}
FORMATS = {
    "one after the other": {},
    "by threads": THREADS,
    "whole files": {"safetensors_load_strategy": "eager"},
    "pickled": {"load_format": "pt"},
    "pickled, by threads": {"load_format": "pt", **THREADS},
    "pickled, as NumPy's": {"load_format": "npcache"},
    "streamed": {"load_format": "runai_streamer"},
}


@pytest.fixture
def streamed(monkeypatch):
    """The files that vLLM's streamer reads; its library is not installed."""
    read = []

    def iterate(files, *_):
        for file in files:
            read.append(Path(file).name)
            for name, tensor in load_file(file).items():
                yield name, tensor.clone()

    def found(path):
        return [str(file) for file in sorted(Path(path).glob("*.safetensors"))]

    monkeypatch.setattr(runai_streamer_loader, "list_safetensors", found)
    monkeypatch.setattr(runai_streamer_loader, "runai_safetensors_weights_iterator", iterate)
    return read


def copied(folder, to, **more):
    """A folder with its weights, and more of them, in every format."""
    copy = shutil.copytree(folder, to / "model")
    weights = load_file(copy / "model.safetensors") | more
    save_file(weights, copy / "model.safetensors", {"format": "pt"})
    for name in ("model.pt", "pytorch_model.bin"):
        torch.save(weights, copy / name)
    return str(copy)


@pytest.mark.parametrize("how", FORMATS)
def test_every_loader_reports_ignored_weights(how, make_tiny, load_briefly, tmp_path, streamed):
    """Also large ones, which are not kept until the end."""
    folder = make_tiny("Cohere", head_dim=32, tie_word_embeddings=False, vocab_size=4096)
    head = load_file(Path(folder, "model.safetensors"))["lm_head.weight"]
    assert head.nbytes > KEPT_BYTES
    with pytest.raises(EngineError, match=r"has lm_head\.weight \(1 .*of cohere; .*backend='hf'"):
        load_briefly(copied(folder, tmp_path), **FORMATS[how])


def test_the_streamer_reads_the_files_that_transformers_reads(
    make_tiny, load_briefly, tmp_path, streamed
):
    folder = copied(make_tiny("Llama"), tmp_path)
    weights = load_file(Path(folder, "model.safetensors"))
    others = {name: torch.randn_like(each) for name, each in weights.items()}
    save_file(others, Path(folder, "zz.safetensors"), {"format": "pt"})
    (row,) = load_briefly(folder, load_format="runai_streamer").ask(Query(text(1, 9)))
    assert streamed == ["model.safetensors"]
    (expected,) = reference_rows(folder, None, [text(1, 9)])
    torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)


@pytest.mark.parametrize("load_format", ["sharded_state", "dummy"])
def test_a_loader_that_cannot_be_watched_is_named(
    load_format, make_tiny, load_briefly, tmp_path, monkeypatch
):
    """It writes weights past the model; random ones are no checkpoint's."""
    folder = make_tiny("Llama")
    saved = shutil.copytree(folder, tmp_path / "model")
    pack = base_loader.process_weights_after_loading

    def save(model, *args):  # before vLLM packs them
        ShardedStateLoader.save_model(model, str(saved))
        pack(model, *args)

    with monkeypatch.context() as patch:
        patch.setattr(base_loader, "process_weights_after_loading", save)
        (expected,) = load_briefly(folder).ask(Query(text(1, 9)))
    (saved / "model.safetensors").unlink()
    with capture_logs() as logs:
        engine = load_briefly(str(saved), load_format=load_format)
    named = [log for log in logs if log["event"] == "weights.unwatched"]
    if load_format == "dummy":
        assert not named
    else:
        (warning,) = named
        assert (warning["log_level"], warning["load_format"]) == ("warning", load_format)
        torch.testing.assert_close(engine.ask(Query(text(1, 9)))[0], expected)


def quantised(name, weight):
    """A matrix as GPTQ has it, in four bits."""
    outputs, inputs = weight.shape
    packed = {
        "qweight": torch.randint(2**31 - 1, (inputs // 8, outputs), dtype=torch.int32),
        "qzeros": torch.full((inputs // 32, outputs // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.full((inputs // 32, outputs), 0.01, dtype=torch.float16),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // 32,
    }
    return {name.replace("weight", part): one for part, one in packed.items()}


@pytest.mark.parametrize("lacks", [False, True])
def test_a_quantised_layer_whose_bias_is_in_no_file_is_rejected(
    lacks, make_tiny, load_briefly, tmp_path
):
    """vLLM would add what was in memory. What it makes itself of quantised weights is no lack."""
    method = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
    folder = shutil.copytree(make_tiny("Qwen2", quantization_config=method), tmp_path / "model")
    weights = {}
    for name, one in load_file(folder / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            weights |= quantised(name, one)
        elif not (lacks and name.endswith("_proj.bias")):
            weights[name] = one.bfloat16()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    if not lacks:
        load_briefly(str(folder), dtype="bfloat16").ask(Query(text(1, 9)))
        return
    said = r"no weights of qwen2 for model\.layers\.0\.self_attn\.qkv_proj\.bias \(2 in .*'hf'"
    with pytest.raises(EngineError, match=said):
        load_briefly(str(folder), dtype="bfloat16")


def test_importing_the_module_of_workers_leaves_the_loads_of_a_process_alone() -> None:
    """vLLM imports it in the user's process too, where it would watch every later load."""
    loaders = model_loader.utils, model_loader.base_loader, model_loader.DefaultModelLoader
    names = ("initialize_model", "initialize_model", "_prepare_weights")
    before = [getattr(one, name) for one, name in zip(loaders, names, strict=True)]
    runpy.run_module("genlm.vllm.worker")
    assert [getattr(one, name) for one, name in zip(loaders, names, strict=True)] == before


NO_PLACE = {
    "model.layers.1.mlp.up_proj.bias": 256,  # which vLLM passes over
    "model.layers.1.self_attn.q_norm.weight": 32,  # for which it has an error of its own
}


@pytest.mark.parametrize("name", NO_PLACE)
def test_weight_without_a_place_in_its_layer_is_rejected(name, small_path, load_briefly, tmp_path):
    """Also by hf, so that the remedy is no other backend."""
    folder = write_variant(small_path, tmp_path / "it", {name: torch.ones(NO_PLACE[name])})
    said = rf"has {name} \(1 such .* LlamaForCausalLM has no place .*correct config\.json"
    with pytest.raises(EngineError, match=said):
        load_briefly(folder)


SCALING = {"rope_type": "linear", "factor": 4.0}


def test_rotary_settings_under_both_names_are_rejected_if_one_is_dropped(
    make_tiny, load_briefly, tmp_path
):
    folder = make_tiny("Llama", rope_parameters={"rope_type": "default", "rope_theta": 777.0})
    dropped = write_variant(folder, tmp_path / "dropped", rope_scaling=SCALING)
    with pytest.raises(EngineError, match=r"rope_scaling: .* drops rope_theta=777\.0 .*write what"):
        load_briefly(dropped)
    whole = {**SCALING, "rope_theta": 777.0}
    served = write_variant(folder, tmp_path / "served", rope_scaling=whole)
    expected, plain = (reference_rows(each, None, [text(1, 9)])[0] for each in (served, folder))
    assert (expected - plain).abs().max() > 0.1
    (row,) = load_briefly(served).ask(Query(text(1, 9)))
    torch.testing.assert_close(row, expected, atol=2e-3, rtol=0)
