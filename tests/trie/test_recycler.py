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


@pytest.mark.parametrize("size", [4 * MIB, 256 * MIB])
def test_a_large_result_gets_the_memory_of_the_one_before(made, size):
    recycler = Recycler()
    for _ in range(3):
        assert recycler.empty((size // 8 // 16, 16), "float64").shape == (size // 128, 16)
    assert made == [size]


@pytest.mark.parametrize("size", [4 * MIB - 1, 256 * MIB + 1])
def test_the_memory_of_small_and_of_huge_results_is_not_kept(made, size):
    recycler = Recycler()
    for _ in range(2):
        recycler.empty((size,), "uint8")
    assert made == [size, size]


@pytest.mark.parametrize(
    ("size", "fits"),
    [(16 * MIB, True), (16 * MIB + 1, False), (8 * MIB, True), (8 * MIB - 1, False)],
)
def test_memory_is_used_where_it_is_large_enough_and_not_far_too_large(made, size, fits):
    recycler = Recycler()
    recycler.empty((16 * MIB,), "uint8")
    recycler.empty((size,), "uint8")
    assert made == [16 * MIB] + [size] * (not fits)


def test_one_block_is_kept(made):
    recycler = Recycler()
    first, second = recycler.empty((5 * MIB,), "uint8"), recycler.empty((6 * MIB,), "uint8")
    del first, second  # the second one last, so its memory is kept
    first, second = recycler.empty((5 * MIB,), "uint8"), recycler.empty((5 * MIB,), "uint8")
    assert not np.shares_memory(first, second)
    assert made == [5 * MIB, 6 * MIB, 5 * MIB]
