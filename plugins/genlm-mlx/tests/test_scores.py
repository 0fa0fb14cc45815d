"""Scores of continuations: one pass each, and the entries of the rows."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import torch
from mlx_lm.models import llama

from genlm.core import Query
from genlm.mlx import runner
from genlm.mlx.loading import load

Folders = Callable[[str], Path]


def tokens(n: int, seed: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(256), k=n))


def assert_scores_of_rows(engine: Any, context: tuple[int, ...], drawn: tuple[int, ...]) -> None:
    (scores,) = engine.genlm_sequence_logprobs([Query(context)], [drawn])
    rows = [engine.logprobs([Query(context + drawn[:i], cold=True)])[0] for i in range(len(drawn))]
    expected = torch.stack([row[token] for row, token in zip(rows, drawn, strict=True)])
    torch.testing.assert_close(scores, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "gemma3", "mamba", "lfm2"])
@pytest.mark.parametrize("chunk", [2, 64])
def test_scores_are_the_entries_of_the_rows(
    folders: Folders, monkeypatch: pytest.MonkeyPatch, family: str, chunk: int
) -> None:
    """Of a context that is new, one that is known whole, one that is known in part, and one that
    lies in a batch of unequal lengths."""
    monkeypatch.setattr(runner, "FIRST_LOGITS", chunk)
    monkeypatch.setattr(runner, "LOGITS_BYTES", chunk * 256 * 4)
    engine = load(str(folders(family)), {"prefill_step_size": 16})
    context = tokens(30, seed=0)
    assert_scores_of_rows(engine, context, tokens(20, seed=1))
    engine.logprobs([Query(context), Query(context[:3])])
    engine.logprobs([Query((*context, 5)), Query((*context[:3], 7))])
    assert_scores_of_rows(engine, (*context, 5), tokens(20, seed=2))
    assert_scores_of_rows(engine, (*context, 5, 6, 7), tokens(1, seed=3))
    assert_scores_of_rows(engine, (*context[:25], 9), tokens(5, seed=4))
    assert_scores_of_rows(engine, context[:1], tokens(1, seed=5))


def test_a_score_is_one_pass_over_what_is_new(
    folders: Folders, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(str(folders("llama")), {})
    context, drawn = tokens(40, seed=0), tokens(60, seed=1)
    engine.logprobs([Query(context)])
    positions: list[int] = []
    forward = llama.Model.__call__

    def noted(model: Any, inputs: mx.array, **options: Any) -> mx.array:
        positions.append(inputs.size)
        return forward(model, inputs, **options)

    monkeypatch.setattr(llama.Model, "__call__", noted)
    engine.genlm_sequence_logprobs([Query((*context, 5))], [drawn])
    assert positions == [60], "the last token of the context, and all of the continuation but one"
    positions.clear()
    engine.logprobs([Query((*context, 6))])
    assert positions == [1], "the context is still known"
