"""The fused kernel of a trie: in Triton's interpreter on a CPU, or on a CUDA device.

``test_triton.py`` runs this in a process of its own: what ``TRITON_INTERPRET`` says when Triton is
imported holds for the whole process.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import structlog

from genlm.core.trie import TokenCharacterTrie, cuda, device
from genlm.core.trie.cuda import TritonReducer
from genlm.core.trie.device import proven_reducer
from genlm.core.trie.reducer import TorchReducer

from .conftest import plan_of

DEVICE = "cpu:0" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def numbers(count):
    return [number.to_bytes(2, "big") for number in range(count)]


#: Blocks are of 64 here. There are rounds where 100 pairs or more can be combined at once.
VOCABULARIES = {
    "no rounds": [b"", b"a", b"ab", b"abc", b"abd", b"b", b"ba"],
    "a round of whole blocks": numbers(256),
    "rounds, and a rest of several blocks": [*numbers(270), b"", b"\x00", b"\x01\x01\x01"],
}


@pytest.fixture
def fused(monkeypatch):
    """Makes a trie that uses the fused kernels, in blocks so small that there are several."""
    monkeypatch.setattr(cuda, "BLOCK", 64)
    monkeypatch.setattr(device, "TorchReducer", TritonReducer)
    return partial(TokenCharacterTrie, device=DEVICE)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("words", VOCABULARIES.values(), ids=VOCABULARIES)
def test_all_parts_of_a_plan(fused, words, rows):
    """Against float64 on the CPU."""
    ws = np.random.default_rng(rows).lognormal(sigma=4.0, size=(rows, len(words)))
    logs, trie, exact = np.log(ws), fused(words), TokenCharacterTrie(words)
    sums, maxima = exact.batch_weight_sum(ws), exact.batch_weight_max(logs)
    np.testing.assert_allclose(trie.batch_weight_sum(ws), sums, rtol=2e-6)
    np.testing.assert_array_equal(trie.batch_weight_max(logs), maxima.astype(np.float32))


def test_weights_without_mass_and_without_value(fused):
    words = VOCABULARIES["rounds, and a rest of several blocks"]
    trie, exact = fused(words), TokenCharacterTrie(words)
    ws = np.random.default_rng(0).normal(size=(4, len(words)))
    ws[0] = -np.inf
    ws[1, ::3] = -np.inf
    ws[2, 7] = ws[2, -1] = np.nan  # in a round, and in the rest
    ws[3, 5] = np.inf
    for name in ("batch_weight_max", "batch_weight_sum"):
        found = getattr(trie, name)(ws, dtype=np.float64)
        np.testing.assert_allclose(found, getattr(exact, name)(ws), rtol=1e-13)
    assert trie.batch_weight_sum(np.zeros((0, len(words)))).shape == (0, len(trie))


def test_the_kernels_prove_themselves():
    plan = plan_of(numbers(210))
    with structlog.testing.capture_logs() as events:
        reducer = proven_reducer(plan, DEVICE, TorchReducer(plan, DEVICE))
    assert (type(reducer), events) == (TritonReducer, [])
