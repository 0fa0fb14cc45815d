"""A model whose forward passes are seen."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx

Key = tuple[int, ...]


class Watched:
    """A model that notes how many tokens each forward pass has, and fails when told to."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.forwards: list[int] = []
        self.failing = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, tokens: mx.array, **options: Any) -> mx.array:
        logits = self._model(tokens, **options)
        if self.failing:  # when all layers have been asked to write
            raise RuntimeError("a forward pass failed")
        self.forwards.append(tokens.size)
        return logits


def keys_of(n: int, length: int, seed: int = 0) -> list[Key]:
    """Keys of the base model."""
    rng = random.Random(seed)
    return [(0, *(rng.randrange(256) for _ in range(length))) for _ in range(n)]
