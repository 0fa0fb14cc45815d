"""Small models in vLLM of the families that it serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm.model_executor.models.transformers import base

from genlm.core import EngineError, Query
from genlm.vllm.loading import load
from tests.sweep import Row, Sweep

from .driven import inspected_here, rarely_collected

OPTIONS = {
    "max_model_len": 96,
    "max_num_seqs": 4,
    "kv_cache_memory_bytes": 16 << 20,
}

#: vLLM's attention on a CPU needs heads of at least 32.
SIZES = {
    "d_model": 128,
    "ffn_dim": 128,
    "ffn_hidden_size": 512,
    "global_head_dim": 32,
    "head_dim": 32,
    "hidden_size": 128,
    "intermediate_size": 128,
    "kv_lora_rank": 32,
    "moe_intermediate_size": 128,
    "moe_k": 2,
    "moe_num_experts": 4,
    "n_embd": 128,
    "n_head": 4,
    "n_heads": 4,
    "n_inner": 256,
    "n_routed_experts": 4,
    "num_attention_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "num_local_experts": 4,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "rotary_dim": 32,
    "shared_expert_intermediate_size": 128,
    "v_head_dim": 32,
    "word_embed_proj_dim": 128,
}


def loaded(folder: str, dtype: str, options: Mapping[str, Any] = OPTIONS) -> Any:
    """A model in vLLM. If vLLM itself rejects it, the error has vLLM's message."""
    gc.freeze()  # freezes what closing the previous model has unfrozen
    try:
        with (
            inspected_here(),
            # This family would change classes of transformers, from which further models are made.
            patch.object(base, "support_torch_compile", lambda **_: lambda kind: kind),
        ):
            return load(folder, {"engine_opts": {**options, "dtype": dtype}})
    except Exception as error:
        raise EngineError(f"{type(error).__name__}: {error}") from error


@contextmanager
def opened(folder: Path) -> Iterator[tuple[int | None, Row]]:
    """The longest context of a model in vLLM, and a function for its rows. If vLLM lacks a kernel,
    the error has vLLM's message."""
    engine = loaded(str(folder), "float32")

    def row_of(context: tuple[int, ...]) -> Any:
        try:
            return engine.evaluate_alone(Query(context, cold=True))
        except Exception as error:
            raise EngineError(f"{type(error).__name__}: {error}") from error

    try:
        yield engine.max_context, row_of
    finally:
        with rarely_collected():
            engine.genlm_close()


SWEEP = Sweep(load=opened, sizes=SIZES)
