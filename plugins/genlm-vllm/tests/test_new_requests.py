"""A prefix that contexts of one step share is computed once, even within a block."""

from __future__ import annotations

import pytest
import torch

from genlm.conformance.declaration import failing_forward
from genlm.core.types import Query, SampleRequest, SamplingParams
from tests.adapter_outcomes import reference_rows

from .driven import text

BLOCK = 32
LONG = SamplingParams(max_tokens=100, temperature=0.0)


def beginning_with(start, count, first=5):
    return [(*start, token) for token in range(first, first + count)]


@pytest.mark.parametrize("length", [20, BLOCK, BLOCK + 8, 3 * BLOCK - 1])
def test_a_cold_prompt_is_computed_once(engine, small_path, length):
    prompt = text(0, length)
    contexts = beginning_with(prompt, 10)
    with engine.computed_tokens() as counts:
        rows = engine.ask(*map(Query, contexts))
    assert sum(counts) == length + 10
    expected = reference_rows(small_path, None, contexts)
    torch.testing.assert_close(torch.stack(rows), torch.stack(expected), atol=5e-4, rtol=0)


def test_the_tokens_of_a_text_are_computed_once(engine):
    """The longest context goes first, regardless of the order of requests."""
    whole = text(0, BLOCK + 25)
    prefixes = [whole[:length] for length in range(BLOCK + 10, BLOCK + 26)]
    assert engine.computes(*prefixes) == [len(whole), 15]


def test_prefixes_of_a_text_are_computed_once(load_briefly):
    """The rows of a score are requested like this. The continuations of the first part do not each
    extend a session of their own, which would need more tokens."""
    engine = load_briefly(max_num_seqs=64, kv_cache_memory_bytes=1 << 23)
    whole = text(0, 2 * BLOCK)
    engine.ask(*(Query(whole[:length]) for length in range(1, BLOCK + 1)))
    second = [whole[:length] for length in range(BLOCK + 1, 2 * BLOCK + 1)]
    assert sum(engine.computes(*second)) == BLOCK + len(second)


def test_new_tokens_that_forks_have_in_common_are_computed_once(engine):
    parent = text(0, 50)
    engine.ask(Query(parent))
    assert engine.computes(*beginning_with(parent + text(1, 12), 10)) == [13, 9]


def test_a_tree_is_computed_branch_by_branch(engine):
    root = text(0, BLOCK)
    branches = [(*root, *text(seed, 15)) for seed in range(1, 4)]
    leaves = [leaf for branch in branches for leaf in beginning_with(branch, 4)]
    assert sum(engine.computes(*leaves)) == BLOCK + 3 * 15 + len(leaves)


def test_requests_do_not_wait_if_they_save_less_than_a_forward(engine):
    assert len(engine.computes(*beginning_with(text(0, 10), 4))) == 1
    assert len(engine.computes(*(text(seed, 12) for seed in range(1, 6)))) == 1
    parent = text(6, 40)
    engine.ask(Query(parent))
    assert len(engine.computes(*beginning_with(parent, 4))) == 1


def test_requests_beyond_the_places_do_not_overtake_waiting_ones(engine):
    """Requests further behind do not take the places of waiting ones."""
    prompt = text(0, 40)
    assert sum(engine.computes(*beginning_with(prompt, 20))) == 40 + 20


def test_requests_do_not_wait_if_the_prefix_is_evicted(engine):
    """Sixty contexts take more than the cache, so none stays when it is answered."""
    with engine.computed_tokens() as counts:
        engine.ask(*map(Query, beginning_with(text(0, 50), 60)))
    assert len(counts) < 60 / 3


def test_samples_wait_for_a_prompt_and_nothing_waits_for_a_sample(engine):
    prompt = text(0, 50)
    long, short = (
        SampleRequest(Query(prompt), params)
        for params in (LONG, SamplingParams(max_tokens=2, temperature=0.0))
    )
    row = Query((*prompt, 5))
    with engine.computed_tokens() as counts:
        answers = engine.step(long, short, Query(prompt), row)
        for _ in range(2):
            answers |= engine.step()
    assert {short, Query(prompt), row} <= answers.keys()
    assert sum(counts) < 2 * 50
    engine.step(dropped=[long])


def test_new_requests_wait_for_a_partly_computed_prompt(engine):
    prompt = text(0, 158)
    siblings = list(map(Query, beginning_with(prompt, 4)))
    with engine.computed_tokens() as counts:
        answers = engine.step(Query(prompt)) | engine.step(*siblings)
        while len(answers) < 5:
            answers |= engine.step()
    assert counts == [64, 64, 30, 4]
    engine.assert_cold_rows(answers)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("leaves", ["the first", "one that waits"])
def test_cancelled_request_holds_up_no_other(engine, leaves, steps):
    prompt = text(0, 158)
    first, *others = map(Query, beginning_with(prompt, 5))
    answers = engine.step(first, *others)
    for _ in range(steps):
        answers |= engine.step()
    gone = first if leaves == "the first" else others[0]
    answers |= engine.step(dropped=[gone])
    for _ in range(5):
        answers |= engine.step()
    assert answers.keys() >= {first, *others} - {gone}
    engine.assert_cold_rows({query: answers[query] for query in others[1:]})


def test_leader_without_room_does_not_delay_others(engine):
    """Samples take 21 of the cache's 27 blocks. The longest of the new requests needs more than the
    rest, and would go first."""
    draws = [SampleRequest(Query(text(seed, 200)), LONG) for seed in (1, 2, 3)]
    answers = engine.step(*draws)
    for _ in range(9):
        answers |= engine.step()
    start = text(0, 60)
    short, long = [*map(Query, beginning_with(start, 3))], Query(start + text(4, 150))
    answers |= engine.step(*short, long)
    for _ in range(2):
        answers |= engine.step()
    assert answers.keys() == {*short}
    engine.step(dropped=[*draws, long])
    engine.assert_cold_rows(answers)


def test_nothing_waits_after_a_failed_step(engine):
    contexts = list(map(Query, beginning_with(text(0, 50), 4)))
    with failing_forward(engine.model)(1), pytest.raises(RuntimeError):
        engine.step(*contexts)
    assert engine.step() == {}
    rows = engine.ask(*contexts)
    engine.assert_cold_rows(dict(zip(contexts, rows, strict=True)))


def test_prompts_are_shared_per_adapter(lora_engine, add):
    adapters = [None, add("a"), add("b")]
    prompt = text(0, 50)
    queries = [Query(ids, each) for ids in beginning_with(prompt, 4) for each in adapters]
    assert sum(lora_engine.computes(*queries)) == 3 * (50 + 4)


def test_without_forks_requests_do_not_wait(load_briefly):
    engine = load_briefly(scheduler_cls=None)
    contexts = beginning_with(text(0, 50), 4)
    assert len(engine.computes(*contexts)) == 2, "three have 19 tokens each to compute"
