"""Every causal family that transformers and vLLM have; collected only when it is named."""

from __future__ import annotations

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from vllm.model_executor.models import ModelRegistry

from tests.sweep import EveryFamily

from .families import SWEEP

SERVED = set(ModelRegistry.get_supported_archs())


class TestVllm(EveryFamily):
    """With transformers 5.19 and vLLM 0.32."""

    families = sorted(
        {
            config.model_type
            for config, kind in MODEL_FOR_CAUSAL_LM_MAPPING.items()
            if getattr(kind, "__name__", None) in SERVED
        }
    )
    sweep = SWEEP
    tried = 40
    # Transformers rounds the slopes of ALiBi to bfloat16, and vLLM does not.
    excused = (("falcon", "alibi"),)
