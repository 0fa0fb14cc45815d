"""Scoring whole continuations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from genlm.core import Query

Contexts = Callable[..., list[tuple[int, ...]]]
Make = Callable[..., Any]


def scores_of_rows(
    model: Any, context: tuple[int, ...], continuation: tuple[int, ...]
) -> torch.Tensor:
    rows = model.expected(*[context + continuation[:n] for n in range(len(continuation))])
    return rows.gather(1, torch.tensor(continuation)[:, None])[:, 0]


def test_scores_are_those_of_single_rows(llama: Any, contexts: Contexts) -> None:
    queries = [*contexts(3, 20), contexts(1, 20)[0]]
    continuations = [(1, 2, 3), (4,), tuple(range(30)), (9, 8)]
    llama.ask(queries[1])
    llama.forwards.clear()
    given = llama.engine.genlm_sequence_logprobs([Query(query) for query in queries], continuations)
    for score, query, continuation in zip(given, queries, continuations, strict=True):
        torch.testing.assert_close(
            score, scores_of_rows(llama, query, continuation), atol=1e-4, rtol=0
        )


def test_a_known_context_is_not_computed_again(llama: Any, contexts: Contexts) -> None:
    context = contexts(1, 20)[0]
    llama.ask(context)
    llama.forwards.clear()
    llama.engine.genlm_sequence_logprobs([Query(context)], [(1, 2, 3, 4)])
    # The context's last token, and all but the last of the continuation.
    assert llama.forwards == [4]


def test_continuations_of_one_context(llama: Any, contexts: Contexts) -> None:
    context = contexts(1, 20)[0]
    continuations = [(1, 2), (1, 3), (1, 2, 3), (4,), (1, 2)]
    given = llama.engine.genlm_sequence_logprobs(
        [Query(context)] * len(continuations), continuations
    )
    for score, continuation in zip(given, continuations, strict=True):
        torch.testing.assert_close(
            score, scores_of_rows(llama, context, continuation), atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("length", [40, 70, 100])
def test_scores_behind_a_context_of_several_chunks(
    pair: Make, llama_config: Make, contexts: Contexts, length: int
) -> None:
    """The first forwards want no row."""
    model = pair(llama_config(), max_batch_tokens=32)
    for context in contexts(3, length):
        (scores,) = model.engine.genlm_sequence_logprobs([Query(context)], [(1, 2, 3)])
        expected = scores_of_rows(model, context, (1, 2, 3))
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=0)
