"""A model is compared with transformers' own rows of its folder, and refused where they differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM

from genlm.core import EngineError, load_model_by_name
from genlm.kit.verify.report import Report
from genlm.sgl import repairs
from tools.tiny import write_tokenizer

OPTIONS = {"max_total_tokens": 512}

ON_A_COPY = "on a scaled copy with thresholds at 16 tokens, "


@pytest.fixture(scope="module")
def capped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Gemma 2 with a low cap and a window of 30 tokens."""
    folder = tmp_path_factory.mktemp("capped")
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=30,
        attn_logit_softcapping=3.0, max_position_embeddings=128, initializer_range=0.3,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    write_tokenizer(folder, "<end>")
    return folder


def test_a_sound_model_passes_within_and_beyond_its_window(capped: Path) -> None:
    reports: list[Report] = []
    load_model_by_name(str(capped), "sgl", engine_opts=OPTIONS, verify=reports.append).close()
    assert [one.about for one in reports[0].compared] == [
        "short contexts",
        "beyond sliding_window=30",
        f"{ON_A_COPY}short contexts",
        f"{ON_A_COPY}beyond sliding_window=16",
    ]
    assert reports[0].dtype == "float32"
    assert all(one.apart < 1e-3 for one in reports[0].compared)


def test_verification_finds_ignored_windows(capped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_windows(attentions: list[Any], *_: Any) -> list[Any]:
        for attention in attentions:
            attention.sliding_window_size = -1
        return []

    monkeypatch.setattr(repairs, "_window", without_windows)
    with pytest.raises(EngineError, match=r"sglang serves another .*beyond sliding_window=30"):
        load_model_by_name(str(capped), "sgl", engine_opts=OPTIONS, verify=True)
