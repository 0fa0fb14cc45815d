"""Verification rejects no correct model. These tests are collected only if the file is named."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.sgl.loading import load
from tests.sound_loads import EverySoundLoad

from .families import SWEEP, served


def loaded(folder: str, dtype: str) -> Any:
    return load(folder, {"engine_opts": {"max_total_tokens": 512, "dtype": dtype}})


class TestSoundLoads(EverySoundLoad):
    """With transformers 5.19 and SGLang 0.5.23."""

    families = sorted(served())
    sweep = SWEEP
    load = loaded
    dtypes = ("float32", "bfloat16")
    tried = 25


class TestSoundLoadsByTransformersCode(EverySoundLoad):
    """The families that SGLang does not have, and runs with transformers' code."""

    families = sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING} - served())
    sweep = SWEEP
    load = loaded
    dtypes = ("float32", "bfloat16")
    tried = 0
