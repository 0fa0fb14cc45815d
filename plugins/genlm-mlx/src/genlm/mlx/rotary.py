"""Rotary embeddings with the frequencies that transformers computes."""

from __future__ import annotations

import re
from typing import Any

from mlx_lm.models import rope_utils
from mlx_lm.models.deepseek_v2 import DeepseekV2YarnRotaryEmbedding

import mlx.core as mx
import mlx.nn as nn
from genlm.kit.settings import layer_type, rotaries
from mlx.utils import tree_unflatten

#: mlx-lm's classes of rotary embeddings, which take the same arguments.
KINDS = (
    nn.RoPE,
    rope_utils.DynamicNTKScalingRoPE,
    rope_utils.Llama3RoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
    DeepseekV2YarnRotaryEmbedding,
)

#: The classes that compute the same as transformers'.
RIGHT = ("proportional", "mrope")


class Rotary(nn.Module):  # type: ignore[misc]
    """Rotates the first ``dims`` features of a head.

    Args:
        like: The module that it replaces: as many features, in the same order.
        periods: The number of positions over which each pair of features turns by one radian:
            ``[dims / 2]``.
        factor: The factor that rotated features are multiplied with.
    """

    def __init__(self, like: Any, periods: mx.array, factor: float) -> None:
        super().__init__()
        self.dims = 2 * periods.size
        latent = isinstance(like, DeepseekV2YarnRotaryEmbedding)
        self.traditional = latent or getattr(like, "traditional", False)
        self.factor = factor
        self._periods = periods

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        if self.factor != 1:
            x = x.at[..., : self.dims].multiply(self.factor)
        return mx.fast.rope(
            x,
            self.dims,
            traditional=self.traditional,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=self._periods,
        )


def repair(model: Any, settings: Any) -> None:
    """Replace rotary embeddings that differ from transformers'. Most of mlx-lm's models know few
    kinds, none knows all settings, and some count layers to find a layer's type."""
    wanted = rotaries(settings)
    changed = []
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        if not isinstance(module, KINDS) or layer is None:
            continue
        right = wanted.get(layer_type(settings, int(layer[1])))
        if right is None or right.kind in RIGHT:
            continue
        periods = mx.array((1 / right.inverse).numpy())
        if not _has(module, periods, right.factor):
            changed.append((name, Rotary(module, periods, right.factor)))
    model.update_modules(tree_unflatten(changed))


def _has(module: Any, periods: mx.array, factor: float) -> bool:
    """Whether plain rotary embeddings have these frequencies."""
    if type(module) is not nn.RoPE or module.dims != 2 * periods.size or factor != 1:
        return False
    own = module.base ** (mx.arange(0, module.dims, 2, dtype=mx.float32) / module.dims)
    return bool(mx.allclose(own / module.scale, periods, rtol=1e-5))
