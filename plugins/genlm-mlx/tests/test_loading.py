"""What is found out, refused or warned of when a model loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.nn as nn
import pytest
import torch
from mlx_lm import convert
from mlx_lm.models import llama
from mlx_lm.models.cache import ChunkedKVCache, ConcatenateKVCache
from safetensors.torch import save_file
from structlog.testing import capture_logs

from genlm.core import Query
from genlm.core.errors import EngineError, InvalidOptionError
from genlm.mlx.loading import amended, load

Folders = Callable[[str], Path]

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


def test_a_quantized_checkpoint(folders: Folders, tmp_path: Path) -> None:
    folder = tmp_path / "quantized"
    convert(str(folders("llama")), str(folder), quantize=True, q_group_size=32, q_bits=8)
    engine = load(str(folder), {})
    assert any(isinstance(module, nn.QuantizedLinear) for module in engine.model.modules())
    queries = [Query((1, 2, 3)), Query((1, 2, 4, 5))]
    rows = engine.logprobs(queries)
    assert (rows - load(str(folders("llama")), {}).logprobs(queries)).abs().max() < 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_step_size": 0},
        {"prefill_step_size": 2.0},
        {"kv_cache_bytes": -1},
        {"kv_cache_bytes": True},
    ],
)
def test_options_out_of_range(options: dict[str, object]) -> None:
    (name,) = options
    with pytest.raises(
        InvalidOptionError, match=f"{name} must be an integer of at least .*; got {options[name]!r}"
    ):
        load("nowhere", options)


def test_unknown_option() -> None:
    with pytest.raises(
        InvalidOptionError, match="no option prefil; it has prefill_step_size, kv_cache_bytes;"
    ):
        load("nowhere", {"prefil": 1})
    with pytest.raises(
        InvalidOptionError, match="no option dtype of its own; it is the checkpoint"
    ):
        load("nowhere", {"dtype": "float16"})


@pytest.mark.parametrize("family", ["exaone", "olmo", "a family of tomorrow"])
def test_what_mlx_lm_cannot_load_is_refused_by_name(tmp_path: Path, family: str) -> None:
    """Settings that it misses; a module that ends the process; and a family that it has not."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(EngineError, match=f"of family '{family}' .*; load it with backend='hf'"):
        load(str(tmp_path), {})


def test_settings_that_a_checkpoint_has_are_left_alone() -> None:
    rope = {"rope_type": "default", "rope_theta": 5.0}
    assert amended({"rope_parameters": rope}) == {"rope_theta": 5.0}
    assert amended({"rope_parameters": rope, "rope_theta": 7.0}) == {}
    assert amended({}) == {}


def test_rotary_settings_by_kind_of_layer_and_within_a_text_model() -> None:
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


def test_what_is_loaded_already_cannot_be_wrapped() -> None:
    from genlm.core import UnsupportedError
    from genlm.mlx import AsyncMlxLM

    with pytest.raises(UnsupportedError, match=r"AsyncMlxLM\.from_name\(name\)"):
        AsyncMlxLM(object(), object())
