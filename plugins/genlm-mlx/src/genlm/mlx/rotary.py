"""Rotary embeddings with the frequencies that transformers computes."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import torch
from mlx_lm.models import rope_utils
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

#: mlx-lm's rotary embeddings, which take the same arguments.
KINDS = (
    nn.RoPE,
    rope_utils.DynamicNTKScalingRoPE,
    rope_utils.Llama3RoPE,
    rope_utils.SuScaledRoPE,
    rope_utils.YarnRoPE,
)

#: What mlx-lm computes as transformers does.
RIGHT = ("proportional", "mrope")


class Rotary(nn.Module):  # type: ignore[misc]
    """Rotates the first ``dims`` features of a head.

    Args:
        like: The module whose place it takes: as many features, in the same order.
        periods: By how many positions each pair of features turns once, over 2 pi: ``[dims / 2]``.
        factor: What rotated features are multiplied with.
    """

    def __init__(self, like: Any, periods: mx.array, factor: float) -> None:
        super().__init__()
        self.dims = 2 * periods.size
        self.traditional = getattr(like, "traditional", False)
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
    """Replace rotary embeddings that are not those of transformers: most of mlx-lm's models know
    few kinds, none knows all of their settings, and some count layers to find out their type."""
    kinds = _by_layer_type(settings)
    types = getattr(settings, "layer_types", None)
    changed = []
    for name, module in model.named_modules():
        layer = re.search(r"layers\.(\d+)\.", name)
        if not isinstance(module, KINDS) or layer is None:
            continue
        layer_type = types[int(layer[1])] if types and None not in kinds else None
        given = kinds[layer_type]
        if "rope_theta" not in given or given.get("rope_type") in RIGHT:
            continue
        frequencies, factor = _frequencies(settings, layer_type, given)
        periods = mx.array((1 / frequencies).numpy())
        if not _has(module, periods, factor):
            changed.append((name, Rotary(module, periods, factor)))
    model.update_modules(tree_unflatten(changed))


def _has(module: Any, periods: mx.array, factor: float) -> bool:
    """Whether plain rotary embeddings have these frequencies."""
    if type(module) is not nn.RoPE or module.dims != 2 * periods.size or factor != 1:
        return False
    own = module.base ** (mx.arange(0, module.dims, 2, dtype=mx.float32) / module.dims)
    return bool(mx.allclose(own / module.scale, periods, rtol=1e-5))


def limit(settings: Any) -> int | None:
    """The longest context with one set of frequencies; ``None`` is no limit."""
    return min(
        (
            given["original_max_position_embeddings"]
            for given in _by_layer_type(settings).values()
            if given.get("rope_type") == "longrope"
        ),
        default=None,
    )


def _by_layer_type(settings: Any) -> dict[str | None, dict[str, Any]]:
    """The rotary settings of each type of layer; under ``None`` where all have the same."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    nested = {kind: given for kind, given in parameters.items() if isinstance(given, dict)}
    return nested or {None: parameters}


def _frequencies(
    settings: Any, layer_type: str | None, given: dict[str, Any]
) -> tuple[torch.Tensor, float]:
    """The angle by which each pair of features turns from one position to the next, and what
    rotated features are multiplied with."""
    if given.get("rope_type", "default") != "default":
        return ROPE_INIT_FUNCTIONS[given["rope_type"]](settings, "cpu", layer_type=layer_type)
    if layer_type is not None:
        with suppress(AttributeError, KeyError, ValueError):
            settings = settings.per_layer_config[layer_type]  # where sizes differ by layer
    size = getattr(settings, "head_dim", None)
    size = size or settings.hidden_size // settings.num_attention_heads
    dims = int(size * given.get("partial_rotary_factor", 1.0))
    return given["rope_theta"] ** -(torch.arange(0, dims, 2, dtype=torch.float32) / dims), 1.0
