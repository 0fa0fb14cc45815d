"""Every causal family that transformers and SGLang have; collected only when it is named."""

from __future__ import annotations

import sglang
import transformers

from tests.sweep import EveryFamily

from .families import SWEEP, served


class TestSgl(EveryFamily):
    """Every family that SGLang serves."""

    backend = "sgl"
    versions = f"sglang {sglang.__version__}, transformers {transformers.__version__}"
    families = sorted(served())
    sweep = SWEEP
    tried = 25
