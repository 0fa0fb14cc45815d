"""A model whose forward passes are seen, and what keeps its state."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from genlm.core import Query
from genlm.mlx.adapters import Adapters
from genlm.mlx.loading import load
from genlm.mlx.runner import Runner

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


class Tried:
    """Blocks or a store over a tiny model."""

    def __init__(
        self,
        folder: Path,
        kind: Any,
        max_bytes: int | None = None,
        *settings: Any,
        step_size: int = 2048,
    ) -> None:
        model = load(str(folder), {}).model
        self.model = Watched(model)
        self._runner = Runner(model, Adapters(model), step_size)
        self.kept = kind(Runner(self.model, Adapters(model), step_size), max_bytes, *settings)

    def compute(self, keys: Sequence[Key]) -> mx.array:
        """The logits after each key."""
        return self.kept.logits([Query(key[1:]) for key in keys])

    def pin(self, key: Key) -> None:
        """Keep the state of a key."""
        self.kept.pin(Query(key[1:]))

    def ask(self, *keys: Key) -> list[int]:
        """The tokens of each forward pass that the rows of ``keys`` took; they are those of the
        keys alone."""
        self.model.forwards.clear()
        rows = _rows(self.compute(keys))
        alone = _rows(mx.concatenate([self._runner.cold(key) for key in keys]))
        assert mx.abs(rows - alone).max().item() < 1e-4
        return list(self.model.forwards)


def _rows(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
