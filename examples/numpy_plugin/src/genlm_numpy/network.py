"""The engine proper, which knows nothing of genlm: a recurrent network, its files, and adapters of
it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


class Network:
    """A recurrent network over bytes. The state after a context is all that it keeps of it.

    Args:
        embedding: ``[vocab_size, width]``.
        recurrence: ``[width, width]``.
    """

    def __init__(self, embedding: Array, recurrence: Array) -> None:
        self.embedding = embedding
        self.recurrence = recurrence

    @classmethod
    def load(cls, path: str) -> Network:
        with np.load(path) as arrays:
            return cls(arrays["embedding"], arrays["recurrence"])

    def save(self, path: Path) -> None:
        np.savez(path, embedding=self.embedding, recurrence=self.recurrence)

    def adapted(self, path: str) -> Network:
        """This network with a low-rank update, read from a file, added to its recurrence."""
        with np.load(path) as arrays:
            return Network(self.embedding, self.recurrence + arrays["up"] @ arrays["down"])

    def start(self) -> Array:
        """The state before the first token, ``[width]``."""
        return np.zeros(self.recurrence.shape[0], dtype=np.float32)

    def advance(self, state: Array, token_id: int) -> Array:
        """The state after one more token; ``state`` stays as it is."""
        advanced: Array = np.tanh(self.recurrence @ state + self.embedding[token_id])
        return advanced

    def logits(self, state: Array) -> Array:
        """The scores of the tokens that may follow, ``[vocab_size]``."""
        scores: Array = self.embedding @ state
        return scores
