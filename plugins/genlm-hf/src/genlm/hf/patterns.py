"""Which earlier positions a layer's tokens attend to."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen


@frozen
class Pattern:
    """Causal attention, perhaps only within a window or a chunk.

    Attributes:
        window: The most positions a token attends to, its own included; ``None`` is all.
        chunk: Positions attend only within the same block of this many; ``None`` is no blocks.
    """

    window: int | None = None
    chunk: int | None = None

    def is_causal_within(self, width: int) -> bool:
        """Whether the first ``width`` positions see no limit."""
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


def layer_patterns(config: Any) -> list[Pattern] | None:
    """The pattern of every layer of a text configuration; ``None`` where one is unknown or has no
    key/value rows."""
    window, chunk = (
        getattr(config, "sliding_window", None),
        getattr(config, "attention_chunk_size", None),
    )
    types = getattr(config, "layer_types", None)
    if types is None:
        return [Pattern(window=window)] * config.num_hidden_layers
    known = {
        "full_attention": Pattern(),
        "sliding_attention": Pattern(window=window),
        "chunked_attention": Pattern(chunk=chunk),
    }
    patterns = [known.get(layer_type) for layer_type in types]
    return (
        [pattern for pattern in patterns if pattern is not None] if None not in patterns else None
    )


def reuse_limit(config: Any) -> int | None:
    """The longest context whose key/value state may be kept; ``None`` is no limit.

    Rotary embeddings of type ``dynamic`` and ``longrope`` change for *all* positions once a context
    is longer than the model's original one, so that state from before that moment, or of a shorter
    neighbour, would be wrong.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)] or [parameters]
    limits = [
        scaling.get(
            "original_max_position_embeddings",
            getattr(config, "original_max_position_embeddings", None),
        )
        or config.max_position_embeddings
        for scaling in nested
        if scaling.get("rope_type") in ("dynamic", "longrope")
    ]
    return min(limits, default=None)
