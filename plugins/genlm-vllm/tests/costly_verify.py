"""Verification rejects no correct model. These tests are collected only if the file is named."""

from __future__ import annotations

from tests.sound_loads import EverySoundLoad

from .costly_sweep import TestVllm
from .families import SWEEP, loaded

FAMILIES = TestVllm.families
del TestVllm  # pytest would collect it here, too


class TestSoundLoads(EverySoundLoad):
    """With transformers 5.19 and vLLM 0.32."""

    families = FAMILIES
    sweep = SWEEP
    load = loaded
    dtypes = ("float32", "bfloat16")
    tried = 40
