"""A model is compared with transformers' own rows of its folder, and refused where they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from genlm.core import EngineError, load_model_by_name
from genlm.kit.verify.report import Report
from genlm.mlx import loading

ON_A_COPY = "on a scaled copy with thresholds at 16 tokens, "


def test_a_sound_model_passes_within_and_beyond_its_window(
    folders: Callable[[str], Path],
) -> None:
    reports: list[Report] = []
    load_model_by_name(str(folders("gemma2")), "mlx", verify=reports.append).close()
    assert [one.about for one in reports[0].compared] == [
        "short contexts",
        "beyond sliding_window=12",
        f"{ON_A_COPY}short contexts",
        f"{ON_A_COPY}beyond sliding_window=16",
    ]
    assert reports[0].dtype == "float32"
    assert all(one.apart < 1e-3 for one in reports[0].compared)


def test_verification_finds_ignored_multipliers(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "repair", lambda model: None)
    with pytest.raises(EngineError, match="mlx-lm serves another model than"):
        load_model_by_name(str(folders("falcon_h1")), "mlx", verify=True)
