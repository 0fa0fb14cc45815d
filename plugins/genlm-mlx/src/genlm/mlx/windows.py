"""Windows: layers whose tokens attend only to the last few positions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, make_prompt_cache

import mlx.core as mx
from genlm.core.errors import EngineError
from genlm.kit.settings import windows as wanted_windows


class Windowed:
    """Attention that asks its own cache for a mask.

    Most of mlx-lm's models make one mask for all layers, and have no windows.

    Attributes:
        window: The most positions that a token attends to, its own included.
    """

    window: int

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        mask = create_attention_mask(x, cache, window_size=self.window, return_array=True)
        return super().__call__(x, mask, cache)  # type: ignore[misc]


def repair(model: Any, settings: Any) -> int | None:
    """Give attention the windows that it has in transformers.

    Returns:
        The longest context with right rows if the attention could not be repaired; else ``None``.

    Raises:
        EngineError: mlx-lm has windows in other layers.
    """
    layers = model.layers
    wanted = wanted_windows(settings, len(layers))
    if not any(wanted):
        return None
    _forget_pattern(model)
    caches = make_prompt_cache(model)
    sizes = [getattr(cache, "max_size", None) for cache in caches]
    if sizes == wanted or (len(sizes) != len(wanted) and set(wanted) <= {*sizes, None}):
        return None
    if any(sizes):
        raise EngineError(
            f"the checkpoint has layer_types={settings.layer_types!r}, but mlx-lm's "
            f"{settings.model_type} has windows in other layers; load it with backend='hf'"
        )
    attentions: list[Any] = [getattr(layer, "self_attn", None) for layer in layers]
    plain = all(type(cache) is KVCache for cache in caches) and len(caches) == len(layers)
    if not plain or not all(map(_takes_mask, attentions)):
        return min(window for window in wanted if window)
    for attention, window in zip(attentions, wanted, strict=True):
        # Cohere 2 rotates positions only in layers with windows.
        if hasattr(attention, "use_sliding_window"):
            attention.use_sliding_window = window is not None
        if window is not None:
            kind = type(attention)
            # Only the class changes, so parameters, and the names by which adapters find them,
            # stay.
            attention.__class__ = type(kind.__name__, (Windowed, kind), {})
            attention.window = window
    return None


def windows_of(model: Any, caches: Sequence[Any]) -> list[int | None]:
    """The window of every layer: that of its attention if repaired, otherwise that of its cache."""
    return [
        getattr(_windowed(layer), "window", getattr(cache, "max_size", None))
        for layer, cache in zip(model.layers, caches, strict=True)
    ]


@contextmanager
def narrowed(model: Any, window: int) -> Iterator[None]:
    """Inside the block, no repaired window is wider than ``window``."""
    found = [one for layer in model.layers if (one := _windowed(layer)) is not None]
    before = [one.window for one in found]
    for one in found:
        one.window = min(one.window, window)
    try:
        yield
    finally:
        for one, wide in zip(found, before, strict=True):
            one.window = wide


def _windowed(layer: Any) -> Windowed | None:
    attention = getattr(layer, "self_attn", None)
    return attention if isinstance(attention, Windowed) else None


def _forget_pattern(model: Any) -> None:
    """Shorten a pattern of windows that is longer than the model (Gemma 3, Cohere 2), because
    mlx-lm would look for a missing layer."""
    for _, module in model.named_modules():
        holders: list[Any] = [module, getattr(module, "args", None)]
        for holder in holders:
            pattern = getattr(holder, "sliding_window_pattern", 0)
            if isinstance(pattern, int) and pattern > len(model.layers):
                holder.sliding_window_pattern = 1


def _takes_mask(attention: Any) -> bool:
    names = ["self", "x", "mask", "cache"]
    return attention is not None and [*signature(type(attention).__call__).parameters] == names
