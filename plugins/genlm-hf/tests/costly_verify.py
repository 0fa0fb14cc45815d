"""Verification rejects no correct model. These tests are collected only if the file is named."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from genlm.hf.engine import HFEngine
from genlm.hf.loading import load_pretrained
from genlm.hf.options import HFOptions
from tests.sound_loads import EverySoundLoad
from tests.sweep import Row, Sweep


def loaded(folder: str, dtype: str) -> HFEngine:
    options = HFOptions.parse({"dtype": dtype, "device": "cpu"})
    return HFEngine(*load_pretrained(folder, options), options)


def opened(folder: Path) -> AbstractContextManager[tuple[int | None, Row]]:
    raise NotImplementedError("only loads are tried")


class TestSoundLoads(EverySoundLoad):
    """With transformers 5.24."""

    families = sorted({kind.model_type for kind in MODEL_FOR_CAUSAL_LM_MAPPING})
    sweep = Sweep(load=opened)
    load: Any = loaded
    tried = 100
