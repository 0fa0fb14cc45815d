"""The weights that mlx-lm loads: it refuses those that a model does not have, but models drop some
before, as they rename those of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mlx_lm.utils import _get_classes

import mlx.core as mx
from genlm.core.checks import describe_error
from genlm.core.logs import get_logger

log = get_logger()

Weights = Mapping[str, mx.array]


def noting(dropped: dict[str, tuple[int, ...]]) -> Callable[[Any], tuple[Any, Any]]:
    """How mlx-lm finds the class of a model; the model then notes what it drops of the first
    weights that it is given.

    Args:
        dropped: Gets the shapes of dropped weights, by name.
    """

    def classes(config: Any) -> tuple[Any, Any]:
        kind, arguments = _get_classes(config)

        def make(given: Any) -> Any:
            model = kind(given)
            if hasattr(kind, "sanitize"):
                model.sanitize = sanitize_once(model)
            return model

        return make, arguments

    def sanitize_once(model: Any) -> Callable[[Weights], Weights]:
        def sanitize(weights: Weights) -> Weights:
            del model.sanitize
            before = dict(weights)
            after: Weights = model.sanitize(weights)
            for name in _dropped(before, after, model.sanitize):
                dropped[name] = tuple(before[name].shape)
            return after

        return sanitize

    return classes


def _dropped(before: Weights, after: Weights, sanitize: Callable[[Weights], Weights]) -> list[str]:
    """The names of weights, other than zeros, of which nothing is left."""
    renamed = {id(one) for one in after.values()}
    gone = {
        name: one for name, one in before.items() if name not in after and id(one) not in renamed
    }
    try:
        lost = _without_influence(before, gone, sanitize)
    except Exception as error:  # a model may do anything
        log.info("weights.unknown", names=[*gone][:4], error=describe_error(error)[:200])
        # An output layer of its own is lost where the model ties it to the embeddings.
        lost = {name: one for name, one in gone.items() if name.endswith("lm_head.weight")}
    return sorted(name for name, one in lost.items() if bool(mx.any(one != 0)))


def _without_influence(
    before: Weights, gone: Weights, sanitize: Callable[[Weights], Weights]
) -> Weights:
    """The dropped weights that no kept weight is made from by joining, splitting or another change:
    the kept weights have no derivative in them."""
    asked = [name for name, one in gone.items() if mx.issubdtype(one.dtype, mx.floating)]
    if not asked:
        return {}

    def converted(*weights: mx.array) -> list[mx.array]:
        found = sanitize({**before, **dict(zip(asked, weights, strict=True))})
        return [one for one in found.values() if mx.issubdtype(one.dtype, mx.floating)]

    zeros = [mx.broadcast_to(mx.zeros((), gone[name].dtype), gone[name].shape) for name in asked]
    ones = [mx.broadcast_to(mx.ones((), one.dtype), one.shape) for one in converted(*zeros)]
    _, derivatives = mx.vjp(converted, zeros, ones)
    # One value of each is enough, and all of them would take as long as the whole model.
    first = mx.stack([one.reshape(-1)[0].astype(mx.float32) for one in derivatives])
    return {
        name: gone[name]
        for name, kept in zip(asked, (first != 0).tolist(), strict=True)
        if not kept
    }
