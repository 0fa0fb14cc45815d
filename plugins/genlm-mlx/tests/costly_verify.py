"""Verification rejects no correct model. These tests are collected only if the file is named."""

from __future__ import annotations

from typing import Any

from genlm.mlx.loading import load
from tests.sound_loads import EverySoundLoad

from .costly_sweep import TestMlx

FAMILIES, SWEEP = TestMlx.families, TestMlx.sweep
del TestMlx  # pytest would collect it here, too


def loaded(folder: str, dtype: str) -> Any:
    return load(folder, {})  # in the type of the model's weights


class TestSoundLoads(EverySoundLoad):
    """With transformers 5.23 and mlx-lm 0.32.2."""

    families = FAMILIES
    sweep = SWEEP
    load = loaded
    tried = 40
