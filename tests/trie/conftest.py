"""A vocabulary for tests of the trie."""

from __future__ import annotations

import numpy as np
import pytest

from genlm.core.tokenization import Token


@pytest.fixture(scope="session")
def vocabulary():
    """A few thousand tokens with long shared prefixes, some of them with equal bytes."""
    generator = np.random.default_rng(0)
    words = [
        bytes(generator.integers(97, 101, generator.integers(0, 9)).tolist()) for _ in range(3000)
    ]
    return Token.vocabulary([*words, *(b" " * n for n in range(40))])


@pytest.fixture(scope="session")
def weights(vocabulary):
    """``[5, len(vocabulary)]`` probabilities that differ by many orders of magnitude."""
    logits = np.random.default_rng(1).normal(scale=8.0, size=(5, len(vocabulary)))
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)
