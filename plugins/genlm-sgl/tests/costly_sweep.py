"""Every causal family that transformers and SGLang have; collected only when it is named."""

from __future__ import annotations

from tests.sweep import EveryFamily

from .families import SWEEP, served


class TestSgl(EveryFamily):
    """With transformers 5.19 and SGLang 0.5.23."""

    families = sorted(served())
    sweep = SWEEP
    tried = 25
