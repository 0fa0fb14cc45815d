"""A beginning that several new requests have is computed once."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch

from genlm.core import EngineError, Query, SamplingParams, UnsupportedError
from genlm.core.types import SampleRequest


@pytest.fixture(scope="module")
def hooks(load_tiny, tiny_without_padding):
    return load_tiny(tiny_without_padding, chunked_prefill_size=64, max_total_tokens=600)


@pytest.fixture(autouse=True)
def cold(hooks):
    hooks.genlm_clear_kv_cache()


def beginning_with(context, n):
    return [(*context, token) for token in range(n)]


def assert_cold_rows(hooks, answered):
    for query, row in answered.items():
        (cold,) = hooks.rows([query.token_ids], cold=True)
        torch.testing.assert_close(row, cold, atol=1e-4, rtol=0)


def test_requests_that_share_a_new_prompt_compute_it_once(hooks, contexts):
    (prompt,) = contexts(1, 40, 40)
    assert hooks.tokens(beginning_with(prompt, 10)) == 50
    asked = list(map(Query, beginning_with(prompt, 10)))
    assert_cold_rows(hooks, dict(zip(asked, hooks.ask(*asked), strict=True)))


def test_the_contexts_of_a_score_compute_its_tokens_once(hooks, contexts):
    (text,) = contexts(1, 60, 60)
    assert hooks.tokens([text[:end] for end in range(40, 61)]) == 60 + 20


def test_a_tree_of_prompts_computes_each_branch_once(hooks, contexts):
    (root,), branches = contexts(1, 40, 40), contexts(3, 20, 20, seed=1)
    leaves = [(*root, i, *branch, j) for i, branch in enumerate(branches) for j in range(4)]
    assert hooks.tokens(leaves) == 40 + 3 * 21 + len(leaves)


def test_samples_wait_for_a_new_prompt_and_not_for_samples(hooks, contexts):
    (prompt,) = contexts(1, 40, 40)
    draw = SampleRequest(Query(prompt), SamplingParams(max_tokens=50, temperature=0.0))
    short = SampleRequest(Query(prompt), SamplingParams(max_tokens=2, temperature=0.0))
    with patch.object(hooks.model, "forward", wraps=hooks.model.forward) as forward:
        answered = hooks.step(draw, short, Query((*prompt, 1)))
        while len(answered) < 2:
            answered |= hooks.step()
    assert answered.keys() == {short, Query((*prompt, 1))}
    assert sum(len(call.args[0]) for call in forward.call_args_list) < 2 * len(prompt)
    hooks.step(dropped=[draw])


def test_new_requests_wait_for_a_partly_computed_prompt(hooks, contexts):
    (prompt,) = contexts(1, 200, 200)
    siblings = list(map(Query, beginning_with(prompt, 3)))
    with patch.object(hooks.model, "forward", wraps=hooks.model.forward) as forward:
        answered = hooks.step(Query(prompt)) | hooks.step(*siblings)
        while len(answered) < 4:
            answered |= hooks.step()
    assert sum(len(call.args[0]) for call in forward.call_args_list) == 203
    assert_cold_rows(hooks, answered)


@pytest.mark.parametrize("leaves", ["the first", "one that waits"])
def test_cancelled_request_holds_up_no_other(hooks, contexts, leaves):
    (prompt,) = contexts(1, 200, 200)
    first, *others = map(Query, beginning_with(prompt, 4))
    answered = hooks.step(first) | hooks.step(*others)
    gone = first if leaves == "the first" else others[0]
    answered |= hooks.step(dropped=[gone])
    while len(answered) < 3:
        answered |= hooks.step()
    assert answered.keys() == {first, *others} - {gone}
    assert_cold_rows(hooks, answered)


def test_request_that_does_not_fit_holds_up_no_other(hooks, contexts):
    (prompt,), (pinned,) = contexts(1, 40, 40, seed=1), contexts(1, 400, 400)
    hooks.genlm_cache_prefix(Query(pinned))
    long = Query((*prompt, *contexts(1, 200, 200, seed=2)[0]))
    refused, row = hooks.ask(long, Query(prompt))
    assert isinstance(refused, EngineError)
    assert_cold_rows(hooks, {Query(prompt): row})


def test_unrelated_requests_are_computed_in_order(hooks, contexts, monkeypatch):
    short, long = contexts(2, 30, 30, seed=1), contexts(2, 100, 100, seed=2)
    computed, forward = [], hooks.model.forward

    def noted(token_ids, *rest, **options):
        computed.extend(token_ids.tolist())
        return forward(token_ids, *rest, **options)

    monkeypatch.setattr(hooks.model, "forward", noted)
    hooks.ask(*map(Query, [short[0], long[0], short[1], long[1]]))
    assert computed == [*short[0], *long[0], *short[1], *long[1]]


def test_nothing_waits_after_a_failed_step(hooks, contexts, monkeypatch):
    (prompt,) = contexts(1, 40, 40)
    asked = list(map(Query, beginning_with(prompt, 4)))
    with monkeypatch.context() as patch:
        patch.setattr(hooks.model, "forward", _break)
        with pytest.raises(RuntimeError, match="broken"):
            hooks.step(*asked)
    assert hooks.step() == {}
    assert_cold_rows(hooks, dict(zip(asked, hooks.ask(*asked), strict=True)))


def _break(*_arguments, **_options):
    raise RuntimeError("broken")


def test_without_prefix_reuse_nothing_waits_or_is_pinned(load_tiny, contexts):
    hooks = load_tiny(disable_radix_cache=True)
    (prompt,) = contexts(1, 40, 40)
    asked = set(map(Query, beginning_with(prompt, 4)))
    assert hooks.step(*asked).keys() == asked
    with pytest.raises(UnsupportedError, match="disable_radix_cache"):
        hooks.genlm_cache_prefix(Query(prompt))
