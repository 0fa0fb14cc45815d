from __future__ import annotations

import gc
import importlib.metadata
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from genlm.core import (
    BackendUnavailableError,
    EngineError,
    InvalidOptionError,
    ModelClosedError,
    ModelNotFoundError,
    load_model_by_name,
)
from genlm.sgl import AsyncSGLTransformer, internals, loading
from genlm.sgl.options import gpu_index
from genlm.sgl.plugin import genlm_backend_info, genlm_load
from genlm.sgl.weights import required
from tests.left_behind import left_behind, random_states
from tools.tiny import write_tokenizer

SMALL = {"max_total_tokens": 1024}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"engine_options": SMALL}, r"\(did you mean engine_opts\?\); it has engine_opts"),
        ({"mem_fraction_static": 0.5}, "one of SGLang's goes in engine_opts"),
        ({"hf_opts": {}}, "it is an option of hf; for sgl, give engine_opts"),
    ],
)
def test_option_in_another_place_is_rejected_with_its_place(tiny, options, said):
    with pytest.raises(InvalidOptionError, match=said):
        load_model_by_name(tiny, "sgl", options)


NO_ROOM = r"no room for a prompt in a pool of \d+ tokens and a context length of \d+"


@pytest.mark.parametrize(
    ("engine_opts", "said"),
    [
        ({"tp_size": 2}, "tp_size=2 is not possible in process, where it is 1; leave it out"),
        ({"speculative_algorithm": "EAGLE"}, "speculative_algorithm='EAGLE'"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init=True"),
        ({"disable_overlap_schedule": False}, "disable_overlap_schedule=False"),
        ({"enable_metrics": True}, "enable_metrics=True"),
        ({"disaggregation_mode": "prefill"}, "disaggregation_mode='prefill'"),
        ({"lora_paths": "a"}, "lora_paths='a'"),
        ({"watchdog_timeout": 300}, "watchdog_timeout=300"),
        ({"mem_fraction_statik": 0.5}, "'mem_fraction_statik'; did you mean 'mem_fraction_static'"),
        ({"model_path": "x"}, "the model's name comes first"),
        ({"dtype": "f32"}, "must be one of auto, float32, .*; got 'f32'"),
        ({"json_model_override_args": "{a"}, r"'json_model_override_args'\] must be .*got '\{a'"),
        ({"json_model_override_args": "[1]"}, r"must be a JSON object, .*got '\[1\]'"),
        ({**SMALL, "max_total_tokens": 4}, NO_ROOM),
        ({**SMALL, "context_length": 4}, NO_ROOM),
    ],
)
def test_unsupported_server_argument_is_rejected(tiny, engine_opts, said):
    with pytest.raises(InvalidOptionError, match=said):
        AsyncSGLTransformer.from_name(tiny, engine_opts)


def test_error_about_an_option_names_engine_opts(tiny):
    said = r"policy='first'; change engine_opts \(schedule_policy\), or load it with backend='hf'"
    with pytest.raises(EngineError, match=said):
        AsyncSGLTransformer.from_name(tiny, {"schedule_policy": "first"})


def test_missing_gpu_is_rejected(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_index("cpu", 7) == 0
    assert gpu_index("cuda", 1) == 1
    with pytest.raises(InvalidOptionError, match=r"gpu_id=2 .* sees 2 GPUs"):
        AsyncSGLTransformer.from_name(tiny, {"device": "cuda"}, gpu_id=2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this PyTorch has pinned memory")
def test_lora_without_pinned_memory_is_rejected_before_loading(tiny):
    message = r"SGLang's LoRA \(engine option enable_lora=True\).* use another backend"
    with pytest.raises(BackendUnavailableError, match=message):
        AsyncSGLTransformer.from_name(tiny, {"enable_lora": True})


def test_the_installed_sglang_is_supported():
    info = genlm_backend_info()
    assert info.available
    declared = map(Requirement, importlib.metadata.requires("genlm-sgl"))
    (sglang,) = [each for each in declared if each.name == "sglang"]
    assert sglang.specifier == SpecifierSet(info.versions)


def test_second_model_in_a_process_is_rejected(tiny):
    # The number is ignored on a CPU.
    with AsyncSGLTransformer.from_name(tiny, SMALL, gpu_id=7) as lm:
        with pytest.raises(BackendUnavailableError, match="close the other model first"):
            AsyncSGLTransformer.from_name(tiny, SMALL)
        row = lm.next_token_logprobs_sync([1, 2, 3])
    with pytest.raises(ModelClosedError):
        lm.next_token_logprobs_sync([1, 2, 3])
    with AsyncSGLTransformer.from_name(tiny, {**SMALL, "device": "cpu"}) as again:
        torch.testing.assert_close(again.next_token_logprobs_sync([1, 2, 3]), row)


def test_closing_releases_the_model(tiny):
    engine = genlm_load(tiny, {"engine_opts": SMALL}, None)
    model = weakref.ref(engine.model)
    engine.genlm_close()
    gc.collect()
    assert model() is None


def test_models_that_are_closed_or_fail_to_load_leave_nothing_behind(tiny, tmp_path, monkeypatch):
    from sglang.srt.managers import load_snapshot

    without_weights = tmp_path / "tiny"
    shutil.copytree(tiny, without_weights, ignore=shutil.ignore_patterns("*.safetensors"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    made, path_for = set(), load_snapshot.shm_path_for

    def noted(name: str) -> str:
        made.add(path_for(name))
        return path_for(name)

    monkeypatch.setattr(load_snapshot, "shm_path_for", noted)

    def use() -> None:
        with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
            lm.next_token_logprobs_sync([1, 2, 3])

    use()  # the first use allocates memory that imports keep
    before = left_behind(made)
    assert made
    with pytest.raises(Exception, match="no_such_backend"):
        AsyncSGLTransformer.from_name(tiny, {**SMALL, "attention_backend": "no_such_backend"})
    assert left_behind(made) == before
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        AsyncSGLTransformer.from_name(str(without_weights), SMALL)
    assert left_behind(made) == before
    use()
    assert left_behind(made) == before


def test_loading_leaves_the_random_generators_alone(tiny):
    *states, of_torch = random_states()
    with AsyncSGLTransformer.from_name(tiny, SMALL):
        *after, drawn_from = random_states()
    assert after == states, "a program's seeds hold"
    assert drawn_from != of_torch, "draws differ from run to run"


def test_a_seed_of_the_engine_fixes_unseeded_draws(tiny):
    drawn = []
    for seed in (1, 1, 2):
        with AsyncSGLTransformer.from_name(tiny, {**SMALL, "random_seed": seed}) as lm:
            drawn.append(lm.sample_sync([5, 6], 8, []))
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_checkpoint_that_lacks_weights_is_rejected(tiny, tmp_path):
    """SGLang would serve uninitialised memory."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    file = folder / "model.safetensors"
    weights = {name: one for name, one in load_file(file).items() if "1.mlp.up_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lacks weights of .*: model\.layers\.1\.mlp\.up"):
        load_model_by_name(str(folder), backend="sgl", llm_opts={"engine_opts": SMALL})


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_other_files_beside_the_weights_are_passed_over(tiny, tmp_path, reference, name):
    """Of a fine-tuning in the folder of an earlier download, for example: SGLang would read the
    shards that the old index names."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    others = {one: torch.randn_like(weight) for one, weight in weights.items()}
    save_file(others, folder / "old-1-of-1.safetensors", {"format": "pt"})
    if name.endswith(".bin"):
        (folder / "model.safetensors").unlink()
        torch.save(weights, folder / name)
    else:
        places = {"metadata": {}, "weight_map": dict.fromkeys(weights, "old-1-of-1.safetensors")}
        (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    with AsyncSGLTransformer.from_name(str(folder), SMALL) as lm:
        row = lm.next_token_logprobs_sync([5, 6, 7])
    expected = reference([(5, 6, 7)])[0, : len(row)].log_softmax(-1)
    torch.testing.assert_close(row, expected, atol=1e-4, rtol=0)


INTERRUPTED = """
import os, signal, sys, threading
from genlm.core import load_model_by_name

class Interrupt:
    caught = threading.Event()

    def find_spec(self, name, path=None, target=None):
        if name == "sglang.lang.api" and not self.caught.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            self.caught.wait(60)
            for _ in range(1000):  # where the load ends if it is this thread's
                pass

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.meta_path.insert(0, Interrupt())
    arguments = sys.argv[1], "sgl", {"engine_opts": {"max_total_tokens": 512}}
    try:
        load_model_by_name(*arguments)
    except KeyboardInterrupt:
        Interrupt.caught.set()
    with load_model_by_name(*arguments) as lm:
        print(len(lm.next_token_logprobs_sync([1, 2, 3])), Interrupt.caught.is_set())
"""


def test_interrupted_first_import_can_be_repeated(tiny):
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, tiny], capture_output=True, text=True, timeout=400
    )
    assert done.stdout.splitlines()[-1:] == ["257 True"], done.stderr[-3000:]


def test_a_load_waits_for_the_end_of_one_that_was_interrupted(tiny, monkeypatch):
    """It still cleans up, and holds SGLang's globals meanwhile."""
    began, ends, asked = threading.Event(), threading.Event(), []

    def construct(options, gpu_id, settings):
        asked.append(gpu_id)
        if gpu_id == 1:
            began.set()
            assert ends.wait(60)
        raise KeyboardInterrupt

    def load(gpu_id):
        with pytest.raises(KeyboardInterrupt):
            internals.Scheduler({}, gpu_id)

    monkeypatch.setattr(internals, "construct", construct)
    monkeypatch.setattr(internals, "release_globals", lambda: None)
    held = lambda: began.is_set() and not ends.is_set()  # noqa: E731
    monkeypatch.setattr(torch.distributed, "is_initialized", held)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(load, 1)
        assert began.wait(60)
        second = pool.submit(load, 2)
        with pytest.raises(TimeoutError):  # the load is not rejected
            second.result(timeout=0.5)
        ends.set()
        first.result(60)
        second.result(60)
    assert asked == [1, 2]


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
OVERRIDES = [
    ({"rope_theta": 500.0}, {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    ({"rope_scaling": YARN}, {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    ({"rope_parameters": YARN}, {"rope_parameters": {**YARN, "rope_theta": 1e6}}),
    (
        {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}},
    ),
    ({"num_hidden_layers": 1}, {"num_hidden_layers": 1, "layer_types": ["full_attention"]}),
]


@pytest.mark.parametrize(("given", "meant"), OVERRIDES, ids=lambda each: "+".join(each))
def test_overrides_give_the_rows_of_a_changed_config_json(given, meant, tmp_path):
    """As Qwen's pages say for long contexts, for example; the theta is the model's own."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    shape = {"vocab_size": 257, "hidden_size": 64, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {**heads, "max_position_embeddings": 64, "initializer_range": 0.3}
    model = Qwen2ForCausalLM(Qwen2Config(**shape, **rope))
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, "<end>")
    other = Qwen2ForCausalLM(Qwen2Config(**{**shape, **rope, **meant})).eval()
    other.load_state_dict(model.state_dict(), strict=False)
    ids = torch.randint(0, 256, (1, 50), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = other(ids).logits[0, -1].log_softmax(-1)
    options = {**SMALL, "json_model_override_args": json.dumps(given)}
    with AsyncSGLTransformer.from_name(str(tmp_path), options) as lm:
        row = lm.next_token_logprobs_sync(ids[0].tolist())
    # SGLang's tokenizer of this family has one token more than the model.
    torch.testing.assert_close(row[:257], expected, atol=1e-3, rtol=0)


class Named(torch.nn.Module):
    """A model that loads weights as SGLang's do: missing weights stay unchanged."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 3)
        self.norm = torch.nn.Parameter(torch.ones(4))
        self.k_scale = torch.nn.Parameter(torch.ones(2))

    def load_weights(self, weights):
        for name, one in weights:
            self.get_parameter(name).data.copy_(one)


WHOLE = {"lm_head.weight": torch.randn(3, 4), "lm_head.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("weights", "lacks"),
    [
        (WHOLE, None),  # a norm that transformers lacks
        (WHOLE | {"norm": torch.full([4], 3.0)}, None),
        ({"lm_head.weight": WHOLE["lm_head.weight"]}, "lm_head.bias"),
        ({"lm_head.bias": WHOLE["lm_head.bias"]}, "lm_head.weight"),
        (WHOLE | {"lm_head.bias": torch.tensor([0, torch.nan, 0])}, "lm_head.bias"),
    ],
)
@pytest.mark.parametrize("zeros", [False, True])
def test_weights_must_be_in_the_checkpoint(weights, lacks, zeros, tiny, monkeypatch):
    from sglang.srt.model_loader import loader

    def made():
        model = Named()
        if zeros:  # uninitialised memory may be zeros
            torch.nn.utils.vector_to_parameters(torch.zeros(15), model.lm_head.parameters())
        return model

    monkeypatch.setattr(loader, "_initialize_model", made)
    said = rf"for {lacks} \(1 in all\) in .*backend='hf'"
    refused = pytest.raises(EngineError, match=said) if lacks else nullcontext()
    with required(tiny, AutoConfig.from_pretrained(tiny)), refused:
        model = loader._initialize_model()
        model.load_weights([*weights.items()])
    assert loader._initialize_model is made
    if lacks is None:
        assert model.norm.tolist() == weights.get("norm", torch.ones(4)).tolist()
        assert model.lm_head.weight.equal(WHOLE["lm_head.weight"])
        model.load_weights([("norm", torch.zeros(4))])  # later loads may be partial


def test_settings_of_a_multimodal_model_are_applied(tmp_path: Path, monkeypatch) -> None:
    """The settings that SGLang reads from the language model's, and the user's changes of these."""
    from transformers import Qwen2_5_VLConfig

    asked = []

    def schedule(arguments, index, settings):
        asked.append(json.loads(arguments["json_model_override_args"]))
        raise KeyboardInterrupt

    monkeypatch.setattr(loading, "Scheduler", schedule)
    Qwen2_5_VLConfig(tie_word_embeddings=True).save_pretrained(tmp_path)
    given = {"text_config": {"rms_norm_eps": 0.5}}
    options = {"json_model_override_args": json.dumps(given), "load_format": "dummy"}
    with pytest.raises(KeyboardInterrupt):
        loading.load(str(tmp_path), {"engine_opts": options})
    assert asked == [{"text_config": {"rms_norm_eps": 0.5, "tie_word_embeddings": True}}]
