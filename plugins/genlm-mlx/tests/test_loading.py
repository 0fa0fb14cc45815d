"""Checks, rejections and warnings when a model is loaded."""

from __future__ import annotations

import gc
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mlx_lm.models import base, llama
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs

from genlm.core import Query, load_model_by_name
from genlm.core.errors import EngineError, InvalidOptionError, ModelNotFoundError
from genlm.mlx.attention import NAME
from genlm.mlx.loading import amended, load

from .watched import Folders, engine_of

CACHES = {"ChunkedKVCache": lambda: ChunkedKVCache(64), "ConcatenateKVCache": ConcatenateKVCache}


@pytest.mark.parametrize("name", CACHES)
def test_caches_that_cannot_be_batched_are_warned_of(
    folders: Folders, monkeypatch: Any, name: str
) -> None:
    folder = str(folders("llama"))
    queries = [Query((1, 2, 3)), Query((1, 2, 4, 5))]
    expected = load(folder, {}).logprobs(queries)
    monkeypatch.setattr(
        llama.Model, "make_cache", lambda model: [CACHES[name]() for _ in model.layers]
    )
    with capture_logs() as logs:
        engine = load(folder, {})
    (warning,) = [log for log in logs if log["event"] == "kv.unbatchable"]
    assert (warning["log_level"], warning["caches"]) == ("warning", [name])
    assert engine.store is None
    assert (engine.logprobs(queries) - expected).abs().max() < 1e-4
    assert engine.genlm_cache_prefix(queries[0])
    engine.genlm_clear_kv_cache()


def without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def with_a_narrow_head(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][:, :-1].contiguous()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_an_encoder(folder: Path) -> None:
    of_t5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps({**of_t5, "is_encoder_decoder": True}))


def masked(folder: Path) -> None:
    of_bert = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(of_bert))


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (without_weights, "the folder has no weights: copy"),
        (with_a_narrow_head, "the weights do not fit config.json: copy"),
        (with_an_encoder, "no causal language model, so no backend serves it"),
        (masked, "no causal language model, so no backend serves it"),
    ],
)
def test_the_remedy_names_no_backend_that_cannot_load_it_either(
    folders: Folders, tmp_path: Path, change: Any, remedy: str
) -> None:
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    change(folder)
    with pytest.raises(EngineError, match=remedy) as raised:
        load(str(folder), {})
    assert "backend=" not in str(raised.value)


def test_other_files_beside_the_weights_are_passed_over(folders: Folders, tmp_path: Path) -> None:
    """mlx-lm would read every file whose name begins with "model"."""
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    (expected,) = load(str(folder), {}).logprobs([Query((1, 2, 3))])
    weights = load_file(folder / "model.safetensors")
    others = {name: torch.randn_like(each) for name, each in weights.items()}
    save_file(others, folder / "model.fp16.safetensors", {"format": "pt"})
    (row,) = load(str(folder), {}).logprobs([Query((1, 2, 3))])
    assert row.equal(expected)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    places = {"metadata": {}, "weight_map": dict.fromkeys(weights, "weights.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    (row,) = load(str(folder), {}).logprobs([Query((1, 2, 3))])
    assert row.equal(expected)


def test_missing_weights_are_rejected_without_a_useless_remedy(
    folders: Folders, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders("llama"), tmp_path / "model")
    file = folder / "model.safetensors"
    weights = {name: one for name, one in load_file(file).items() if "1.mlp.up_proj" not in name}
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(ModelNotFoundError, match=r"lacks weights of .*: model\.layers\.1\.mlp\.up"):
        load(str(folder), {})


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"prefill_step_size": 0}, "prefill_step_size must be an integer of at least 1; got 0"),
        ({"prefill_step_size": 2.0}, "prefill_step_size must be an integer .*; got 2.0"),
        ({"kv_cache_bytes": -1}, "kv_cache_bytes must be an integer of at least 0; got -1"),
        ({"kv_cache_bytes": True}, "kv_cache_bytes must be an integer .*; got True"),
        ({"prefil": 1}, "no option prefil; it has prefill_step_size, kv_cache_bytes;"),
        ({"dtype": "float16"}, "no option dtype of its own; it is the checkpoint"),
    ],
)
def test_unsupported_option_is_rejected(options: dict[str, object], said: str) -> None:
    with pytest.raises(InvalidOptionError, match=said):
        load("nowhere", options)


@pytest.mark.parametrize("family", ["exaone", "olmo", "a family of tomorrow"])
def test_model_that_mlx_lm_cannot_load_is_rejected_by_name(tmp_path: Path, family: str) -> None:
    """The cases are missing settings, a module that ends the process, and an unknown family."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=f"of family '{family}' .*; load it with backend='hf'"):
        load(str(tmp_path), {})


def test_learned_positions_are_the_longest_context(folders: Folders) -> None:
    assert engine_of(folders("gpt2")).max_context == 256


def test_settings_that_a_checkpoint_has_are_left_alone() -> None:
    rope = {"rope_type": "default", "rope_theta": 5.0}
    assert amended({"rope_parameters": rope}) == {"rope_theta": 5.0}
    assert amended({"rope_parameters": rope, "rope_theta": 7.0}) == {}


def test_rotary_settings_of_each_kind_of_layer_are_lifted() -> None:
    kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    text = {"hidden_size": 8, "rope_parameters": kinds}
    lifted = {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "linear", **kinds["full_attention"]},
        "rope_local_base_freq": 1e4,
    }
    assert amended({"text_config": text}) == {"text_config": {**text, **lifted}}


OPEN_FILES = """
import resource, sys
from genlm.core import load_model_by_name

resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), int(sys.argv[3])))
load_model_by_name(sys.argv[1], "mlx").close()
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("3000", "3500"), ("3000", "3500")),
        (("500", "1000"), ("1000", "1000")),
        (("500", "4000"), ("2048", "4000")),
    ],
)
def test_a_process_may_not_open_fewer_files(
    folders: Folders, before: tuple[str, str], after: tuple[str, str]
) -> None:
    command = [sys.executable, "-c", OPEN_FILES, str(folders("llama")), *before]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == [*after], done.stderr[-2000:]


def test_closing_the_last_model_restores_mlx_lm(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Independent of models that other tests have left open.
    monkeypatch.setattr(llama, NAME, base.scaled_dot_product_attention)
    folder = str(folders("llama"))
    first, second = (load_model_by_name(folder, backend="mlx") for _ in range(2))
    with second:
        with first:
            expected = first.next_token_logprobs_sync([1, 2, 3])
        torch.testing.assert_close(second.next_token_logprobs_sync([1, 2, 3]), expected)
        assert getattr(llama, NAME) is not base.scaled_dot_product_attention
    assert getattr(llama, NAME) is base.scaled_dot_product_attention


def test_freed_unclosed_model_restores_mlx_lm(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama, NAME, base.scaled_dot_product_attention)
    engine = load(str(folders("llama")), {})
    assert getattr(llama, NAME) is not base.scaled_dot_product_attention
    del engine
    gc.collect()
    assert getattr(llama, NAME) is base.scaled_dot_product_attention
