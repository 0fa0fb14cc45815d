"""A model is compared with transformers' own rows of its folder, and refused where they differ."""

from __future__ import annotations

import pytest

from genlm.core import EngineError, load_model_by_name
from genlm.kit.verify import loading as verified_loading
from genlm.kit.verify.report import Report
from genlm.vllm import loading
from genlm.vllm.verified import subject_of

from .driven import SMALL

ON_A_COPY = "on a scaled copy with thresholds at 16 tokens, "


@pytest.fixture(scope="module")
def windowed(make_tiny):
    """A Cohere 2 with a window of 30 tokens."""
    return make_tiny(
        "Cohere2", vocab_size=256, sliding_window=30, head_dim=32, max_position_embeddings=256,
        layer_types=["sliding_attention"] * 2,
    )  # fmt: skip


def test_a_sound_model_passes_within_and_beyond_its_window(windowed):
    reports: list[Report] = []
    load_model_by_name(windowed, "vllm", engine_opts=SMALL, verify=reports.append).close()
    assert [one.about for one in reports[0].compared] == [
        "short contexts",
        "beyond sliding_window=30",
        f"{ON_A_COPY}short contexts",
        f"{ON_A_COPY}beyond sliding_window=16",
    ]
    assert reports[0].dtype == "float32"
    assert all(one.apart < 1e-3 for one in reports[0].compared)


@pytest.fixture
def no_copy(monkeypatch):
    """Leaves out the scaled copy: its engine is in a process of its own, which lacks the fault that
    a test makes here."""
    monkeypatch.setattr(verified_loading, "serve_copy", lambda *_: None)


def test_verification_finds_a_changed_setting(windowed, no_copy, monkeypatch):
    monkeypatch.setattr(loading, "corrections", lambda *_: {"hf_overrides": {"logit_scale": 0.5}})
    with pytest.raises(EngineError, match="vllm serves another model than"):
        load_model_by_name(windowed, "vllm", engine_opts=SMALL, verify=True)


def test_window_that_is_one_token_too_long_is_found(windowed, no_copy, monkeypatch):
    # vLLM makes the windows of Cohere wider.
    monkeypatch.setattr(loading, "corrections", lambda *_: {})
    with pytest.raises(EngineError, match="beyond sliding_window=30"):
        load_model_by_name(windowed, "vllm", engine_opts=SMALL, verify=True)


def _narrower(config):
    config.sliding_window = 20
    return config


@pytest.mark.parametrize("overrides", [{"sliding_window": 20}, _narrower])
def test_overrides_are_part_of_what_is_compared(windowed, overrides):
    subject = subject_of(windowed, {"engine_opts": {"hf_overrides": overrides}})
    assert subject.changes["sliding_window"] == 20
    assert subject.unknown is None


@pytest.mark.parametrize(
    "given", [{"load_format": "dummy"}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8_e5m2"}]
)
def test_options_that_change_rows_disable_verification(windowed, given):
    assert subject_of(windowed, {"engine_opts": given}).unknown
