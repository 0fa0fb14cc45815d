from __future__ import annotations

import gc
import importlib.metadata
import random
import re
import shutil
import tempfile
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from genlm.core import (
    BackendUnavailableError,
    EngineError,
    InvalidOptionError,
    ModelClosedError,
    ModelNotFoundError,
    load_model_by_name,
)
from genlm.sgl import AsyncSGLTransformer, plugin
from genlm.sgl.options import gpu_index
from genlm.sgl.plugin import genlm_backend_info, genlm_load
from genlm.sgl.weights import required
from tests.left_behind import left_behind

SMALL = {"max_total_tokens": 1024}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_size", 2),
        ("speculative_algorithm", "EAGLE"),
        ("skip_tokenizer_init", True),
        ("disable_overlap_schedule", False),
        ("enable_metrics", True),
        ("disaggregation_mode", "prefill"),
        ("lora_paths", "a"),
        ("watchdog_timeout", 300),
    ],
)
def test_what_cannot_run_in_process_is_refused(tiny, name, value):
    with pytest.raises(InvalidOptionError, match=f"{name}={value!r}"):
        AsyncSGLTransformer.from_name(tiny, {name: value})


def test_a_misspelt_server_argument(tiny):
    with pytest.raises(
        InvalidOptionError, match="'mem_fraction_statik'; did you mean 'mem_fraction_static'"
    ):
        AsyncSGLTransformer.from_name(tiny, {"mem_fraction_statik": 0.5})


@pytest.mark.parametrize("option", [{"max_total_tokens": 4}, {"context_length": 4}])
def test_no_room_for_a_prompt(tiny, option):
    with pytest.raises(
        InvalidOptionError,
        match=r"no room for a prompt in a pool of \d+ tokens and a context length of \d+",
    ):
        AsyncSGLTransformer.from_name(tiny, {**SMALL, **option})


@pytest.mark.parametrize("device", ["cpu", None])
def test_the_gpu_is_ignored_on_the_cpu(tiny, device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with AsyncSGLTransformer.from_name(tiny, {**SMALL, "device": device}, gpu_id=7) as lm:
        assert lm.next_token_logprobs_sync([1]).device.type == "cpu"


def test_there_must_be_such_a_gpu(tiny, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert gpu_index("cuda", 1) == 1
    with pytest.raises(InvalidOptionError, match=r"gpu_id=2 .* sees 2 GPUs"):
        AsyncSGLTransformer.from_name(tiny, {"device": "cuda"}, gpu_id=2)


def test_an_unknown_option(tiny):
    with pytest.raises(
        InvalidOptionError,
        match=r"no option engine_options \(did you mean engine_opts\?\); it has engine_opts",
    ):
        load_model_by_name(tiny, backend="sgl", llm_opts={"engine_options": SMALL})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"mem_fraction_static": 0.5}, "one of SGLang's goes in engine_opts"),
        ({"hf_opts": {}}, "it is an option of hf; for sgl, give engine_opts"),
        ({"engine_opts": {"model_path": "x"}}, "the model's name comes first"),
        ({"engine_opts": {"dtype": "f32"}}, "must be one of auto, float32, .*; got 'f32'"),
    ],
)
def test_an_option_in_another_place(tiny, options, said):
    with pytest.raises(InvalidOptionError, match=said):
        load_model_by_name(tiny, "sgl", options)


@pytest.mark.parametrize("version", ["0.5.8", "0.5.24"])
def test_another_sglang_is_refused_with_the_reason(tiny, version, monkeypatch):
    installed = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: version if name == "sglang" else installed(name)
    )
    assert not genlm_backend_info().available
    for load in (
        AsyncSGLTransformer.from_name,
        lambda model: load_model_by_name(model, backend="sgl"),
    ):
        with pytest.raises(
            BackendUnavailableError, match=rf"sglang {version} is installed, .*0\.5\.17"
        ):
            load(tiny)


def test_the_installed_sglang_is_supported():
    assert genlm_backend_info().available


def test_few_files_touch_sglang():
    sources = Path(plugin.__file__).parent.glob("*.py")
    touching = [
        file.name
        for file in sources
        if re.search(r"^\s*(from|import) sglang\b", file.read_text(), re.M)
    ]
    assert sorted(touching) == [
        "attention.py",
        "construction.py",
        "internals.py",
        "repairs.py",
        "weights.py",
    ]


def test_one_model_at_a_time(tiny):
    with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
        with pytest.raises(BackendUnavailableError, match="close the other model first"):
            AsyncSGLTransformer.from_name(tiny, SMALL)
        row = lm.next_token_logprobs_sync([1, 2, 3])
    with pytest.raises(ModelClosedError):
        lm.next_token_logprobs_sync([1, 2, 3])
    with AsyncSGLTransformer.from_name(tiny, SMALL) as again:
        torch.testing.assert_close(again.next_token_logprobs_sync([1, 2, 3]), row)


def test_a_load_that_fails_leaves_room_for_the_next(tiny, tmp_path):
    with pytest.raises(Exception, match="no_such_backend"):
        AsyncSGLTransformer.from_name(tiny, {**SMALL, "attention_backend": "no_such_backend"})
    without_weights = shutil.copytree(
        tiny, tmp_path / "tiny", ignore=shutil.ignore_patterns("*.safetensors")
    )
    with pytest.raises(RuntimeError, match="Cannot find any model weights"):
        AsyncSGLTransformer.from_name(str(without_weights), SMALL)
    with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
        assert lm.next_token_logprobs_sync([1]).shape == (len(lm.byte_vocab),)


def test_closing_releases_the_model(tiny):
    engine = genlm_load(tiny, {"engine_opts": SMALL})
    model = weakref.ref(engine.model)
    engine.genlm_close()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("refused", [False, True], ids=["used", "refused"])
def test_a_closed_model_leaves_nothing_behind(tiny, refused, tmp_path, monkeypatch):
    from sglang.srt.managers import load_snapshot

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made, path_for = set(), load_snapshot.shm_path_for

    def noted(name: str) -> str:
        made.add(path_for(name))
        return path_for(name)

    monkeypatch.setattr(load_snapshot, "shm_path_for", noted)

    def use() -> None:
        with AsyncSGLTransformer.from_name(tiny, SMALL) as lm:
            lm.next_token_logprobs_sync([1, 2, 3])

    use()  # what imports leave
    before = left_behind(made)
    assert made
    if refused:
        with pytest.raises(Exception, match="no_such_backend"):
            AsyncSGLTransformer.from_name(tiny, {**SMALL, "attention_backend": "no_such_backend"})
    else:
        use()
    assert left_behind(made) == before


def test_loading_leaves_the_random_generators_alone(tiny):
    def draw():
        return random.random(), np.random.random(), torch.rand(1).item()

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with AsyncSGLTransformer.from_name(tiny, SMALL):
        assert draw() == expected


def test_prompts_run_in_chunks(tiny, contexts, reference):
    asked = contexts(12, 1, 90)
    with AsyncSGLTransformer.from_name(tiny, {**SMALL, "chunked_prefill_size": 16}) as lm:
        rows = lm.batch_next_token_logprobs_sync(asked)
    # The vocabulary is narrower than the model.
    expected = reference(asked)[:, : rows.shape[1]].log_softmax(dim=-1)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)


def test_a_checkpoint_that_lacks_weights_is_refused(tiny, tmp_path):
    """SGLang would serve what was in memory before."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    file = folder / "model.safetensors"
    weights = {name: one for name, one in load_file(file).items() if "1.mlp.up_proj" not in name}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lacks weights of .*: model\.layers\.1\.mlp\.up"):
        load_model_by_name(str(folder), backend="sgl", llm_opts={"engine_opts": SMALL})


class Named(torch.nn.Module):
    """As SGLang's models load weights: what is not there stays as it is."""

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(4, 3)
        self.norm = torch.nn.Parameter(torch.ones(4))
        self.k_scale = torch.nn.Parameter(torch.ones(2))

    def load_weights(self, weights):
        for name, one in weights.items():
            self.get_parameter(name).data.copy_(one)


WHOLE = {"lm_head.weight": torch.randn(3, 4), "lm_head.bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("weights", "lacks"),
    [
        (WHOLE, None),  # a norm that transformers has not
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
        if zeros:  # as memory may be
            torch.nn.utils.vector_to_parameters(torch.zeros(15), model.lm_head.parameters())
        return model

    monkeypatch.setattr(loader, "_initialize_model", made)
    with required(tiny):
        model = loader._initialize_model()
    with (
        pytest.raises(EngineError, match=rf"for {lacks} \(1 of 3\) in .*backend='hf'")
        if lacks
        else nullcontext()
    ):
        model.load_weights(weights)
    assert loader._initialize_model is made
    if lacks is None:
        assert model.norm.tolist() == weights.get("norm", torch.ones(4)).tolist()
        assert model.lm_head.weight.equal(WHOLE["lm_head.weight"])
        model.load_weights({"norm": torch.zeros(4)})  # later a part of them is enough
