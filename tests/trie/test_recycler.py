"""The memory for large results, which is used again."""

from __future__ import annotations

import numpy as np
import pytest

from genlm.core.trie.cpu import Recycler

MIB = 1 << 20


@pytest.fixture
def made(monkeypatch):
    """The number of bytes of every block that is made."""
    sizes = []
    empty = np.empty

    def noted(shape, dtype):
        block = empty(shape, dtype)
        sizes.append(block.nbytes)
        return block

    monkeypatch.setattr(np, "empty", noted)
    return sizes


@pytest.mark.parametrize(
    ("asked", "again"),
    [
        ([4 * MIB] * 3, True),
        ([256 * MIB] * 3, True),
        ([4 * MIB - 1] * 2, False),  # small
        ([256 * MIB + 1] * 2, False),  # huge
        ([16 * MIB, 16 * MIB + 1], False),  # does not fit
        ([16 * MIB, 8 * MIB], True),
        ([16 * MIB, 8 * MIB - 1], False),  # the block is far too large
    ],
)
def test_large_result_reuses_fitting_memory(made, asked, again):
    recycler = Recycler()
    for size in asked:
        recycler.empty((size,), "uint8")
    assert made == (asked[:1] if again else asked)


def test_recycler_keeps_one_block(made):
    recycler = Recycler()
    first, second = recycler.empty((5 * MIB,), "uint8"), recycler.empty((6 * MIB,), "uint8")
    del first, second  # the second block is freed last, so it is kept
    first, second = recycler.empty((5 * MIB,), "uint8"), recycler.empty((5 * MIB,), "uint8")
    assert not np.shares_memory(first, second)
    assert made == [5 * MIB, 6 * MIB, 5 * MIB]
