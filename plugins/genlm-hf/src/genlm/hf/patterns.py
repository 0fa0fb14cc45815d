"""The earlier positions that a layer's tokens attend to."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen

from genlm.hf.positions import rope_scalings


@frozen
class Pattern:
    """Causal attention, perhaps only within a window or a chunk.

    Attributes:
        window: The most positions a token attends to, its own included; ``None`` is all.
        chunk: Positions attend only within the same block of this many; ``None`` means no blocks.
    """

    window: int | None = None
    chunk: int | None = None

    def is_causal_within(self, width: int) -> bool:
        """Whether neither window nor chunk limits attention among the first ``width`` positions."""
        return all(limit is None or width <= limit for limit in (self.window, self.chunk))

    def first_seen(self, position: int) -> int:
        """The first position that ``position`` attends to."""
        limits = [0]
        if self.window is not None:
            limits.append(position - self.window + 1)
        if self.chunk is not None:
            limits.append(position // self.chunk * self.chunk)
        return max(limits)

    def allowed(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Whether positions ``queries`` attend to positions ``keys``; the two are broadcast."""
        allowed = keys <= queries
        if self.window is not None:
            allowed = allowed & (keys > queries - self.window)
        if self.chunk is not None:
            allowed = allowed & (keys // self.chunk == queries // self.chunk)
        return allowed


def layer_patterns(model: Any) -> list[Pattern] | None:
    """The pattern of every layer of a model; ``None`` if a layer's pattern is unknown, or a layer
    keeps no keys and values."""
    config = model.config.get_text_config(decoder=True)
    window = attention_window(model)
    chunk = getattr(config, "attention_chunk_size", None)
    types = getattr(config, "layer_types", None)
    if types is None:
        # In a model of the user's own, they may have other names.
        layers = getattr(config, "num_hidden_layers", None)
        return [Pattern(window=window)] * layers if isinstance(layers, int) else None
    known = {
        "full_attention": Pattern(),
        "sliding_attention": Pattern(window=window),
        "chunked_attention": Pattern(chunk=chunk),
    }
    patterns = [known.get(layer_type) for layer_type in types]
    return (
        [pattern for pattern in patterns if pattern is not None] if None not in patterns else None
    )


def attention_window(model: Any) -> int | None:
    """The sliding window that a model's attention uses; ``None`` without one.

    A configuration may mention a window that is switched off.
    """
    config = model.config.get_text_config(decoder=True)
    if getattr(config, "use_sliding_window", True) is False:
        return None
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and window > 0 else None


def reuse_limit(config: Any) -> int | None:
    """The longest context whose key/value state may be kept; ``None`` means no limit.

    Some models change their attention for *all* positions once a context exceeds a limit, or count
    positions in a way that this plugin's caches do not support. State from before the limit, or
    from a shorter neighbour in the batch, would then be wrong:

    * rotary embeddings of type ``dynamic`` and ``longrope``, beyond the model's original length;
    * attention whose temperature changes with the position (Llama 4), from ``floor_scale`` on;
    * attention to the best ``index_topk`` positions only (DeepSeek V3.2), beyond that length.
    """
    limits = [
        scaling.get(
            "original_max_position_embeddings",
            getattr(config, "original_max_position_embeddings", None),
        )
        or config.max_position_embeddings
        for scaling in rope_scalings(config, "dynamic", "longrope")
    ]
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(int(config.floor_scale) - 1)
    if isinstance(getattr(config, "index_topk", None), int):
        limits.append(config.index_topk)
    return min(limits, default=None)
