"""The fused kernels of a trie: in Triton's interpreter on a CPU, or on a CUDA device.

``test_triton.py`` runs this in a process of its own: what ``TRITON_INTERPRET`` says when Triton is
imported holds for the whole process.
"""

from __future__ import annotations

import os
from functools import partial

import numpy as np
import pytest
import structlog
import torch

from genlm.core.trie import TokenCharacterTrie, cuda, device
from genlm.core.trie.cuda import TritonReducer
from genlm.core.trie.device import TorchReducer, proven_reducer
from genlm.core.trie.weights import MAX, SUM

from .conftest import plan_of

DEVICE = "cpu:0" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def numbers(count):
    return [number.to_bytes(2, "big") for number in range(count)]


#: Blocks are of 64 here. There are rounds where 100 pairs or more can be combined at once.
VOCABULARIES = {
    "one item": [b"a"],
    "one empty item": [b""],
    "an empty item and another": [b"", b"a"],
    "no rounds, a nested rest": [b"", b"a", b"ab", b"abc", b"abd", b"b", b"ba"],
    "a round of whole blocks": numbers(256),
    "rounds, and a rest of several blocks": [*numbers(270), b"", b"\x00", b"\x01\x01\x01"],
}

#: How to lay out ``[rows, items]`` in memory.
STRIDES = {
    "neighbours": lambda ws: ws,
    "columns": lambda ws: ws.t().contiguous().t(),
    "a part": lambda ws: torch.nn.functional.pad(ws, (3, 2))[:, 3:-2],
    "every other": lambda ws: ws.repeat_interleave(2, 1)[:, ::2],
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


@pytest.mark.parametrize("lay_out", STRIDES.values(), ids=STRIDES)
def test_rows_of_any_strides(fused, lay_out):
    """Against PyTorch's own functions, in float64."""
    words = numbers(210)
    ws = torch.rand(3, len(words), dtype=torch.float64, device=DEVICE)
    trie, plain = fused(words), TorchReducer(plan_of(words), DEVICE)
    sums = trie.batch_weight_sum(lay_out(ws), dtype=torch.float64)
    np.testing.assert_allclose(sums.cpu(), plain.reduce(SUM, ws).cpu(), rtol=1e-14)
    maxima = trie.batch_weight_max(lay_out(ws), dtype=torch.float64)
    assert torch.equal(maxima, plain.reduce(MAX, ws))


def test_one_row_given_several_times(fused):
    words = VOCABULARIES["no rounds, a nested rest"]
    ws = torch.rand(len(words), device=DEVICE)
    sums = fused(words).batch_weight_sum(ws.expand(5, -1), dtype=torch.float32)
    assert torch.equal(sums, sums[:1].expand(5, -1))


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
