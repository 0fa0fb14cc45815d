"""A model that records its forward passes, together with its store."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load_model

from genlm.core import Query
from genlm.mlx.adapters import Adapters
from genlm.mlx.engine import MlxEngine
from genlm.mlx.loading import amended, load
from genlm.mlx.runner import Runner

Folders = Callable[[str], Path]
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
        if self.failing:  # fail after all layers have requested their writes
            raise RuntimeError("a forward pass failed")
        self.forwards.append(tokens.size)
        return logits


def tokens_of(length: int, seed: int) -> Key:
    """Random tokens."""
    return tuple(random.Random(seed).choices(range(256), k=length))


def keys_of(n: int, length: int, seed: int = 0) -> list[Key]:
    """Keys of the base model."""
    rng = random.Random(seed)
    return [(0, *(rng.randrange(256) for _ in range(length))) for _ in range(n)]


def by_mlx_lm(folder: Path) -> Any:
    """The model of a folder as mlx-lm alone loads it, with rotary settings in a form that mlx-lm
    reads."""
    config = json.loads((folder / "config.json").read_text())
    return load_model(folder, model_config=amended(config))[0]


@functools.cache
def engine_of(folder: Path) -> MlxEngine:
    """An engine that is loaded once, and that no test changes."""
    return load(str(folder), {})


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
        self._plain = engine_of(folder).model
        self.model = Watched(self._plain)
        runner = Runner(self.model, Adapters(self._plain), step_size)
        self.kept = kind(runner, max_bytes, *settings)

    def compute(self, keys: Sequence[Key]) -> mx.array:
        """The logits after each key."""
        return self.kept.logits([Query(key[1:]) for key in keys])

    def pin(self, key: Key) -> None:
        """Keep the state of a key."""
        self.kept.pin(Query(key[1:]))

    def ask(self, *keys: Key) -> list[int]:
        """The tokens of each forward pass that the rows of ``keys`` took; they are those of the
        keys without kept state."""
        self.model.forwards.clear()
        rows = logprobs_of(self.compute(keys))
        for length in {len(key) for key in keys}:
            places = [at for at, key in enumerate(keys) if len(key) == length]
            alike = mx.array([keys[at][1:] for at in places])
            expected = logprobs_of(self._plain(alike)[:, -1])
            assert mx.abs(rows[mx.array(places)] - expected).max().item() < 1e-4
        return list(self.model.forwards)


def logprobs_of(logits: mx.array) -> mx.array:
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)
