"""A real model of 49152 tokens: its rows are normalised, and warm ones are those of cold
contexts."""

from __future__ import annotations

from genlm.core import Query
from genlm.mlx.loading import load


def test_rows_of_a_real_model(real_model: str) -> None:
    engine = load(real_model, {})
    # Written by transformers 5, unseen by mlx-lm on its own.
    assert engine.model.args.rope_theta == 100000.0
    for contexts in (
        [(7021,), (504, 1789, 28)],
        [(7021, 28), (504, 1789, 28, 253), (504, 1789, 30)],
    ):
        rows = engine.logprobs([Query(context) for context in contexts])
        assert rows.logsumexp(dim=-1).abs().max() < 2e-5
        for row, context in zip(rows, contexts, strict=True):
            cold = engine.logprobs([Query(context, cold=True)])[0]
            assert (row - cold).abs().max() < 1e-3
