"""How much memory the KV cache takes on a CPU, and how long contexts may be with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from genlm.core.errors import InvalidOptionError
from genlm.core.logs import get_logger
from genlm.kit.memory import available_memory

log = get_logger()

#: The fewest bytes that the KV cache takes.
MIN_CACHE_BYTES = 2 << 30

#: The largest share of the free memory that room for one context of full length may take.
FREE_MEMORY_SHARE = 0.5

#: The options by which a user sets the size of the cache.
SIZES = ("gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override")


def cache_on_a_cpu(settings: Any, engine_opts: Mapping[str, Any]) -> dict[str, int]:
    """Options that give the cache room for one context of full length, if half of the free memory
    is enough for it, and that limit contexts to what the cache holds. By default, vLLM would take
    most of the machine's memory.

    Args:
        settings: The settings of the language model; ``None`` if transformers does not know it.
        engine_opts: The user's options, which take precedence.
    """
    if any(engine_opts.get(name) is not None for name in SIZES):
        return {}
    free = int(FREE_MEMORY_SHARE * (available_memory() or 0))
    wanted = 0 if settings is None else _bytes_of_a_context(settings, engine_opts)
    chosen = {"kv_cache_memory_bytes": max(MIN_CACHE_BYTES, min(wanted, free)), "max_model_len": -1}
    return {name: value for name, value in chosen.items() if engine_opts.get(name) is None}


def _bytes_of_a_context(settings: Any, engine_opts: Mapping[str, Any]) -> int:
    """The most bytes that the longest context takes, which is what it takes if all layers keep all
    positions."""
    longest = engine_opts.get("max_model_len")
    if not isinstance(longest, int) or longest < 0:
        longest = getattr(settings, "max_position_embeddings", None) or 0
    heads = getattr(settings, "num_attention_heads", None) or 0
    kept = getattr(settings, "num_key_value_heads", None) or heads
    width = getattr(settings, "head_dim", None) or settings.hidden_size // max(heads, 1)
    layers = getattr(settings, "num_hidden_layers", None) or 0
    exact = str(engine_opts.get("dtype")).removeprefix("torch.") in ("float", "float32")
    size = (torch.float32 if exact else torch.bfloat16).itemsize
    blocks = longest + 1024  # some blocks are vLLM's own, and the last one is not full
    return int(2 * layers * kept * width * size * blocks)


def warn_of_shorter_contexts(longest: int, settings: Any, options: Mapping[str, Any]) -> None:
    """Warn if the cache is too small for the model's longest context."""
    wanted = getattr(settings, "max_position_embeddings", None) or 0
    if options.get("max_model_len") == -1 and longest < wanted:
        log.warning(
            "vllm.context_shortened",
            to=longest - 1,
            of=wanted,
            why="the KV cache has no room for a longer one; set a larger kv_cache_memory_bytes",
            kv_cache_memory_bytes=options.get("kv_cache_memory_bytes"),
        )


def explain_small_cache(error: Exception, options: Mapping[str, Any]) -> None:
    """Explain vLLM's error about a cache that is too small for ``max_model_len``. vLLM itself
    recommends an option that has no effect if ``kv_cache_memory_bytes`` is set.

    Raises:
        InvalidOptionError: names the options that have an effect.
    """
    size = options.get("kv_cache_memory_bytes")
    if isinstance(error, ValueError) and size and "KV cache" in str(error):
        raise InvalidOptionError(
            f"engine_opts['kv_cache_memory_bytes'] is {size}, in which vLLM has no room for a "
            f"context of max_model_len={options.get('max_model_len')} "
            f"({' '.join(str(error).split()):.220} ...); give a larger kv_cache_memory_bytes or a "
            "smaller max_model_len (gpu_memory_utilization has no effect beside it)"
        ) from error
