"""What `nox -s gpu` measures, on the CPU: its figures are of rows that are the raw model's."""

from __future__ import annotations

import itertools

import pytest
import torch

from tools.gpu import ATOL, step_figures, trie_figures
from tools.shapes import model_of


@pytest.mark.parametrize("shape", ["tiny", "tiny-gemma2", "tiny-mamba"])
@pytest.mark.parametrize("shared", [False, True])
def test_a_step_gives_the_rows_of_the_raw_model(shape: str, shared: bool) -> None:
    model = model_of(shape, "cpu", torch.float32)
    figures = step_figures(model, contexts=3, length=15, repeat=2, shared=shared)
    assert figures["rows_apart"] < ATOL


def test_the_trie_is_measured_with_its_error() -> None:
    words = [bytes(pair) for pair in itertools.product(range(64), repeat=2)]
    figures = trie_figures(words, "cpu:0", rows=2, repeat=1)
    assert figures["ways"] == ["plain"]
    assert 0 < figures["plain_relative_error"] < 2e-6
