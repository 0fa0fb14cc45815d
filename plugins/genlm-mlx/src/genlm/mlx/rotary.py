"""Rotary embeddings with the frequencies that transformers computes."""

from __future__ import annotations

import re
import sys
from typing import Any

from mlx_lm.models import rope_utils
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

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
        like: The module that it replaces: as many features, in the same order.
        periods: In how many positions each pair of features turns by one radian: ``[dims / 2]``.
        factor: The factor of rotated features.
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
    """Replace rotary embeddings that differ from transformers': most of mlx-lm's models know few
    kinds, none knows all settings, and some count layers to find their type."""
    theirs = _of_transformers(settings)
    if theirs is None:
        return
    kinds = _by_layer_type(settings)
    types = getattr(settings, "layer_types", None)
    changed = []
    for name, module in model.named_modules():
        layer = re.search(r"\.(\d+)\.", name)
        if not isinstance(module, KINDS) or layer is None:
            continue
        kind = types[int(layer[1])] if types and None not in kinds else None
        if kinds[kind].get("rope_type") in RIGHT:
            continue
        prefix = "" if kind is None else f"{kind}_"
        if not hasattr(theirs, f"{prefix}inv_freq"):  # GPT-J's, which no setting scales
            continue
        periods = mx.array((1 / getattr(theirs, f"{prefix}inv_freq").float()).numpy())
        factor = float(getattr(theirs, f"{prefix}attention_scaling"))
        if not _has(module, periods, factor):
            changed.append((name, Rotary(module, periods, factor)))
    model.update_modules(tree_unflatten(changed))


def _of_transformers(settings: Any) -> Any:
    """The rotary embeddings that transformers has for these settings, if they are one kind."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(settings), None)
    if model is None:
        return None
    found = {
        name: kind
        for name, kind in vars(sys.modules[model.__module__]).items()
        if name.endswith("RotaryEmbedding") and "Vision" not in name
    }
    return next(iter(found.values()))(settings) if len(found) == 1 else None


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
    """The rotary settings of each type of layer; under ``None`` if all have the same."""
    parameters = getattr(settings, "rope_parameters", None) or {}
    nested = {kind: given for kind, given in parameters.items() if isinstance(given, dict)}
    return nested or {None: parameters}
