"""What mlx-lm 0.32 computes wrongly in batches, put right in a model that it has loaded."""

from __future__ import annotations

from typing import Any

from mlx_lm.models import gemma2

import mlx.core as mx


class Gemma2Attention(gemma2.Attention):  # type: ignore[misc]
    """Gemma 2's attention with masks that differ by row.

    With several query heads for each key/value head, mlx-lm's scores have five axes,
    ``[rows, kv_heads, repeats, new, all]``. It lines up the mask of a batch, ``[rows, 1, new,
    all]``, with the last four: rows meet key/value heads, which fits by accident where there are as
    many of both.
    """

    def __call__(self, x: mx.array, mask: mx.array | None = None, cache: Any = None) -> mx.array:
        if mask is not None and mask.ndim == 4 and self.repeats > 1:
            mask = mx.expand_dims(mask, 2)
        return super().__call__(x, mask, cache)


def repair(model: Any) -> None:
    """Put right, in place, what a batch would get wrong."""
    for _, module in model.named_modules():
        if type(module) is gemma2.Attention:
            # The class alone: parameters, and the names by which adapters find them, stay.
            module.__class__ = Gemma2Attention
