"""Padded embeddings: more ids than the tokenizer has tokens."""

from __future__ import annotations

import pytest
import torch

from genlm.core import Query, SamplingParams
from genlm.core.types import SampleRequest, ScoreRequest

from .conftest import TOKENS, WIDTH, Hooks

ENDS = (*range(200, 220), TOKENS - 1, 5)


@pytest.fixture
def padded(load_tiny):
    return Hooks(load_tiny().engine, width=TOKENS)


def test_padding_has_no_mass_in_rows_draws_and_scores(padded, contexts, reference):
    (context,) = contexts(1, 10, 10)
    (scores,) = padded.ask(ScoreRequest(Query(context), ENDS))
    before = [context + ENDS[:at] for at in range(len(ENDS))]
    rows = padded.rows(before)
    expected = reference(before)[:, :TOKENS].log_softmax(-1)
    torch.testing.assert_close(rows, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(scores, expected[range(len(ENDS)), ENDS], atol=2e-4, rtol=0)
    torch.manual_seed(0)
    padded.check_frequencies(Query(context))
    padded.check_frequencies(Query(context), temperature=2.0)


def test_samples_beside_rows_have_no_padding(padded, contexts):
    """SGLang's sampler overwrites the logits of these rows."""
    (context,) = contexts(1, 10, 10)
    draws = [SampleRequest(Query(context), SamplingParams(max_tokens=200)) for _ in range(4)]
    row, *drawn = padded.ask(Query(context), *draws)
    assert max(map(max, drawn)) < TOKENS
    assert row.shape == (TOKENS,)


def test_scores_are_made_from_rows_if_padding_cannot_be_hidden(load_tiny, contexts):
    padded = Hooks(load_tiny().engine, width=TOKENS)
    processor, padded.model.logits_processor = padded.model.logits_processor, Without()
    processor_of = lambda *given, **how: processor(*given, **how)  # noqa: E731
    padded.model.logits_processor.forward = processor_of
    (context,) = contexts(1, 10, 10)
    request = ScoreRequest(Query(context), ENDS)
    assert padded.ask(request) == [None]
    assert padded.rows([context]).shape == (1, WIDTH)


class Without(torch.nn.Module):
    """A module that lacks the attributes of a logits processor."""
