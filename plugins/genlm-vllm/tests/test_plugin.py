"""The plugin before any model is loaded: its description, and the options that it rejects."""

from __future__ import annotations

from importlib.metadata import requires
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from genlm.core.errors import BackendUnavailableError, InvalidOptionError, UnsupportedError
from genlm.vllm import AsyncVirtualLM, loading, plugin
from genlm.vllm.internals import EngineCore
from genlm.vllm.plugin import VERSIONS
from genlm.vllm.streams import EngineStream


def test_float32_is_float32_on_a_gpu_and_rejected_for_adapters(monkeypatch):
    def heeded(is_cpu, **engine_opts):
        monkeypatch.setattr(
            "vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: is_cpu)
        )
        monkeypatch.setattr(loading.os, "environ", environment := {})
        loading._heed_float32(engine_opts)
        return environment

    assert heeded(False, dtype=torch.float32) == {"TRITON_F32_DEFAULT": "ieee"}
    assert heeded(False, dtype="bfloat16", enable_lora=True) == {}
    assert heeded(True, dtype="float32", enable_lora=True) == {}
    with pytest.raises(InvalidOptionError, match=r"float32.*give dtype="):
        heeded(False, dtype="float32", enable_lora=True)


def test_vllm_is_preferred_only_on_cuda(monkeypatch):
    monkeypatch.setattr(plugin, "_engine_distribution", lambda: "vllm")
    monkeypatch.setattr(plugin, "_has_cuda", lambda: True)
    on_cuda = plugin.genlm_backend_info().preference
    monkeypatch.setattr(plugin, "_has_cuda", lambda: False)
    assert plugin.genlm_backend_info().preference < on_cuda


def test_missing_vllm_error_says_how_to_install_it(monkeypatch):
    assert plugin.genlm_backend_info().available
    monkeypatch.setattr("genlm.core.types.find_spec", lambda name: None)
    info = plugin.genlm_backend_info()
    assert not info.available
    assert "pip install" in str(info.unavailable)


def test_loaded_model_cannot_be_wrapped():
    with pytest.raises(UnsupportedError, match=r"AsyncVirtualLM\.from_name\(name\)"):
        AsyncVirtualLM(object(), object())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"live_session": 3},
            r"no option live_session \(did you mean live_sessions\?\); it has engine_opts, live",
        ),
        ({"engine_opts": ["enforce_eager"]}, "dict"),
        ({"gpu_memory_utilization": 0.5}, "an argument of vLLM goes in engine_opts"),
        ({"hf_opts": {}}, "it is an option of hf; for vllm, give engine_opts"),
        ({"engine_opts": {"model": "x"}}, "the model's name comes first"),
        ({"live_sessions": -1}, "live_sessions"),
        ({"engine_opts": {"max_modl_len": 100}}, "max_model_len"),
        ({"engine_opts": {"speculative_config": {"method": "ngram"}}}, "speculative"),
        ({"engine_opts": {"data_parallel_size": 2}}, "replica"),
        (
            {"engine_opts": {"tensor_parallel_size": 2, "enable_batch_sharded_sampling": True}},
            "part of the batch",
        ),
        ({"engine_opts": {"tensor_parallel_size": 2, "worker_extension_cls": "a.B"}}, "RowAccess"),
        ({"engine_opts": {"tensor_parallel_size": "two"}}, "'tensor_parallel_size'.*got 'two'"),
        ({"engine_opts": {"enable_lora": True, "max_loras": "two"}}, "'max_loras'.*got 'two'"),
    ],
)
def test_unsupported_option_is_rejected(options, said, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidOptionError, match=said):
        plugin.genlm_load(str(tmp_path), options, verify=None)


def test_unsuitable_vllm_is_rejected_with_the_missing_name():
    client = SimpleNamespace(add_request=None, get_output=None)
    with pytest.raises(BackendUnavailableError, match=r"no abort_requests.* README"):
        EngineCore(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)), EngineStream())


def test_version_range_in_errors_equals_the_installed_one():
    (declared,) = [
        one for one in map(Requirement, requires("genlm-vllm") or ()) if one.name == "vllm"
    ]
    assert declared.specifier == SpecifierSet(VERSIONS)
    assert plugin.genlm_backend_info().versions == VERSIONS
