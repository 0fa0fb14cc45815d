"""Every causal family that transformers and vLLM have; collected only when it is named."""

from __future__ import annotations

import transformers
import vllm
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from vllm.model_executor.models import ModelRegistry

from tests.sweep import EveryFamily

from .families import SWEEP

SERVED = set(ModelRegistry.get_supported_archs())

#: After vLLM has tried to load the tokenizer of this family, it can load no other model in the
#: process.
LAST = "inkling_text"


class TestVllm(EveryFamily):
    """Every family that vLLM serves."""

    backend = "vllm"
    versions = f"vllm {vllm.__version__}, transformers {transformers.__version__}"
    families = sorted(
        {
            config.model_type
            for config, kind in MODEL_FOR_CAUSAL_LM_MAPPING.items()
            if getattr(kind, "__name__", None) in SERVED
        },
        key=lambda family: (family == LAST, family),
    )
    sweep = SWEEP
    tried = 40
