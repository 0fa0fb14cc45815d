"""A prompt longer than a chunk is computed in several steps, and others are answered between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from genlm.core import Query
from genlm.mlx.loading import load

from .watched import Folders, tokens_of

CHUNK = 16


def assert_cold(engine: Any, query: Query, row: torch.Tensor) -> None:
    (cold,) = engine.logprobs([Query(query.token_ids, cold=True)])
    assert (row - cold).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_requests_are_answered_between_chunks_of_a_long_prompt(
    folders: Folders, family: str
) -> None:
    engine = load(str(folders(family)), {"prefill_step_size": CHUNK})
    first, second = Query(tokens_of(10 * CHUNK, 0)), Query(tokens_of(5 * CHUNK + 1, 1))
    assert engine.genlm_step([first, second], [], engine.vocab_size) == []
    answered, short = {}, Query(tokens_of(3, 2))
    while first not in answered or second not in answered:
        step = {
            answer.request: answer.result
            for answer in engine.genlm_step([short], [], engine.vocab_size)
        }
        assert short in step, "it is answered in the step that it joins"
        answered |= step
        short = Query((*short.token_ids, 7))
        assert len(answered) < 20
    assert list(answered).index(first) < list(answered).index(second)
    for query, row in answered.items():
        assert_cold(engine, query, row)


def test_dropped_long_prompt_is_not_answered(folders: Folders) -> None:
    engine = load(str(folders("llama")), {"prefill_step_size": CHUNK})
    long, short = Query(tokens_of(10 * CHUNK, 0)), Query(tokens_of(3, 1))
    assert engine.genlm_step([long], [], engine.vocab_size) == []
    answers = engine.genlm_step([short], [long], engine.vocab_size)
    for _ in range(12):  # more steps than it needs
        answers += engine.genlm_step([], [], engine.vocab_size)
    assert [answer.request for answer in answers] == [short]


def test_contexts_behind_one_long_prompt_wait_for_it_once(folders: Folders) -> None:
    """The oldest context computes the shared prefix. After that, all need few tokens."""
    engine = load(str(folders("llama")), {"prefill_step_size": CHUNK})
    prompt = tokens_of(6 * CHUNK, 0)
    queries = [Query((*prompt, i)) for i in range(20)]
    answers, steps = engine.genlm_step(queries, [], engine.vocab_size), 1
    while len(answers) < len(queries):
        answers += engine.genlm_step([], [], engine.vocab_size)
        steps += 1
    assert steps <= 7
    for answer in answers[::7]:
        assert_cold(engine, answer.request, answer.result)


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_request_equal_to_a_chunk_is_answered(folders: Folders, family: str) -> None:
    """Prefixes of one prompt, each a whole number of chunks."""
    engine = load(str(folders(family)), {"prefill_step_size": CHUNK})
    prompt = tokens_of(4 * CHUNK, 0)
    others = [Query(tokens_of(5, seed)) for seed in range(1, 7)]
    queries = [Query(prompt[:stop]) for stop in (CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)]
    answers = engine.genlm_step(others, [], engine.vocab_size)
    for step in (queries, [], [], []):
        answers += engine.genlm_step(step, [], engine.vocab_size)
    assert len(answers) == len(others) + len(queries)
    for token in (7, 8):
        grown = [Query((*query.token_ids, token)) for query in (*others, *queries)]
        answers += engine.genlm_step(
            [one for one in grown if len(one.token_ids) <= CHUNK], [], engine.vocab_size
        )
        answers += engine.genlm_step(
            [one for one in grown if len(one.token_ids) > CHUNK], [], engine.vocab_size
        )
    for answer in answers:
        assert_cold(engine, answer.request, answer.result)
