"""A prompt longer than a chunk is computed in several steps, and others are answered between."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from genlm.core import Query
from genlm.mlx.loading import load

Folders = Callable[[str], Path]
CHUNK = 16


def context(n: int, seed: int) -> Query:
    return Query(tuple(random.Random(seed).choices(range(256), k=n)))


def cold(engine, query):
    return engine.logprobs([Query(query.token_ids, cold=True)])[0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "mamba", "lfm2"])
def test_others_are_answered_between_the_chunks_of_a_long_prompt(
    folders: Folders, family: str
) -> None:
    engine = load(str(folders(family)), {"prefill_step_size": CHUNK})
    first, second = context(10 * CHUNK, seed=0), context(5 * CHUNK + 1, seed=1)
    assert engine.genlm_step([first, second], []) == []
    answered, short = {}, context(3, seed=2)
    while first not in answered or second not in answered:
        step = {answer.request: answer.result for answer in engine.genlm_step([short], [])}
        assert short in step, "it is answered in the step that it joins"
        answered |= step
        short = Query((*short.token_ids, 7))
        assert len(answered) < 20
    assert list(answered).index(first) < list(answered).index(second)
    for query, row in answered.items():
        assert (row - cold(engine, query)).abs().max() < 1e-3


def test_a_long_prompt_that_is_dropped_is_not_answered(folders: Folders) -> None:
    engine = load(str(folders("llama")), {"prefill_step_size": CHUNK})
    long, short = context(10 * CHUNK, seed=0), context(3, seed=1)
    assert engine.genlm_step([long], []) == []
    assert [answer.request for answer in engine.genlm_step([short], [long])] == [short]


def test_contexts_behind_one_long_prompt_wait_for_it_once(folders: Folders) -> None:
    """The oldest computes what they share; then all are near."""
    engine = load(str(folders("llama")), {"prefill_step_size": CHUNK})
    prompt = context(6 * CHUNK, seed=0).token_ids
    queries = [Query((*prompt, i)) for i in range(20)]
    answers, steps = engine.genlm_step(queries, []), 1
    while len(answers) < len(queries):
        answers += engine.genlm_step([], [])
        steps += 1
    assert steps <= 7
    for answer in answers[::7]:
        assert (answer.result - cold(engine, answer.request)).abs().max() < 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma3", "mamba"])
def test_a_chunk_that_is_itself_asked_for(folders: Folders, family: str) -> None:
    """Prefixes of one prompt, each a whole number of chunks."""
    engine = load(str(folders(family)), {"prefill_step_size": CHUNK})
    prompt = context(4 * CHUNK, seed=0).token_ids
    others = [context(5, seed) for seed in range(1, 7)]
    queries = [Query(prompt[:stop]) for stop in (CHUNK, 2 * CHUNK, 3 * CHUNK, 4 * CHUNK)]
    answers = engine.genlm_step(others, [])
    for step in (queries, [], [], []):
        answers += engine.genlm_step(step, [])
    assert len(answers) == len(others) + len(queries)
    for token in (7, 8):
        grown = [Query((*query.token_ids, token)) for query in (*others, *queries)]
        answers += engine.genlm_step([one for one in grown if len(one.token_ids) <= CHUNK], [])
        answers += engine.genlm_step([one for one in grown if len(one.token_ids) > CHUNK], [])
    for answer in answers:
        assert (answer.result - cold(engine, answer.request)).abs().max() < 1e-3
