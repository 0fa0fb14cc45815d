"""The engine proper, which knows nothing of genlm: a transformer, its files, and adapters of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Indices = NDArray[np.int64]

#: The attention of a layer. Its arguments are the number of the layer, and queries, keys and values
#: of all tokens, ``[n, width]``.
Attend = Callable[[int, Array, Array, Array], Array]

HEADS = 4


class Network:
    """A transformer over bytes.

    Args:
        weights: ``embedding [vocab_size, width]``, and for each layer ``attention [width, 3 *
            width]``, ``output [width, width]``, ``up [width, inner]`` and ``down [inner, width]``.
    """

    def __init__(self, weights: Mapping[str, Array]) -> None:
        self.weights = weights
        self.layers, self.width = weights["attention"].shape[:2]

    @classmethod
    def load(cls, path: str) -> Network:
        with np.load(path) as arrays:
            return cls({name: arrays[name] for name in arrays})

    def save(self, path: Path) -> None:
        arrays: dict[str, Any] = {**self.weights}
        np.savez(path, **arrays)

    def adapted(self, path: str) -> Network:
        """This network with a low-rank update, read from a file, added to its attention."""
        with np.load(path) as arrays:
            update: Array = arrays["up"] @ arrays["down"]
        weights = self.weights
        return Network({**weights, "attention": weights["attention"] + update})

    def cold(self, tokens: Sequence[int]) -> Array:
        """The scores of the next token of a context, ``[vocab_size]``."""

        def attend(layer: int, *states: Array) -> Array:
            return attention(0, *states)

        row: Array = self.forward(tokens, range(len(tokens)), np.array([-1]), attend)[0]
        return row

    def forward(
        self, tokens: Sequence[int], positions: Sequence[int], wanted: Indices, attend: Attend
    ) -> Array:
        """The scores after some of the tokens, ``[len(wanted), vocab_size]``."""
        weights = self.weights
        state = weights["embedding"][np.array(tokens)] + _waves(np.array(positions), self.width)
        for layer in range(self.layers):
            mixed = attend(layer, *np.split(_norm(state) @ weights["attention"][layer], 3, axis=1))
            state = state + mixed @ weights["output"][layer]
            inner = np.maximum(_norm(state) @ weights["up"][layer], 0)
            state = state + inner @ weights["down"][layer]
        scores: Array = _norm(state[wanted]) @ weights["embedding"].T
        return scores


def attention(start: int, query: Array, keys: Array, values: Array) -> Array:
    """Attention of tokens at positions from ``start`` on to all positions up to their own."""
    heads = [part.reshape(len(part), HEADS, -1).swapaxes(0, 1) for part in (query, keys, values)]
    scores = heads[0] @ heads[1].swapaxes(1, 2) / heads[0].shape[2] ** 0.5
    later = np.arange(len(keys)) > start + np.arange(len(query))[:, None]
    scores = np.where(later, np.float32(-np.inf), scores)
    shares = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed: Array = np.divide(shares @ heads[2], shares.sum(axis=2, keepdims=True))
    return mixed.swapaxes(0, 1).reshape(query.shape)


def _norm(state: Array) -> Array:
    size = np.sqrt((state * state).mean(axis=1, keepdims=True) + np.float32(1e-6))
    scaled: Array = np.divide(state, size)
    return scaled


def _waves(positions: Indices, width: int) -> Array:
    angles = positions[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)
