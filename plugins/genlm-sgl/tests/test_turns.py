"""Samples and prompts take turns."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from genlm.core import Query, SamplingParams
from genlm.core.types import Request, SampleRequest


@pytest.fixture(scope="module")
def hooks(load_tiny, tiny_without_padding):
    return load_tiny(tiny_without_padding, chunked_prefill_size=32)


@pytest.mark.parametrize("length", [20, 50])
def test_sample_advances_while_new_requests_keep_coming(hooks, contexts, length):
    """By itself, SGLang computes prompts for as long as some come, or one is half computed."""
    hooks.genlm_clear_kv_cache()
    drawn, *new_requests = contexts(17, length, length)
    draw = SampleRequest(Query(drawn), SamplingParams(max_tokens=5, temperature=0.0))
    (alone,) = hooks.ask(draw)
    hooks.genlm_clear_kv_cache()
    hooks.step(draw)
    asked: list[Request] = []
    answered: dict[Request, Any] = {}
    for new_request in map(Query, new_requests):
        asked.append(new_request)
        answered |= hooks.step(new_request)
        if draw in answered:
            break
    assert draw in answered
    assert len(asked) <= 8  # four more tokens, and a step for each of the new requests
    for _ in range(2 * len(asked)):  # more steps than the remaining requests need
        answered |= hooks.step()
    assert answered.keys() == {draw, *asked}
    assert answered[draw] == alone
    for query in asked:
        cold = hooks.rows([query.token_ids], cold=True)[0]
        torch.testing.assert_close(answered[query], cold, atol=1e-4, rtol=0)


@pytest.mark.parametrize("begun", [1, 2, 3])
def test_half_computed_prompt_is_given_up_if_it_is_dropped_beside_a_sample(hooks, contexts, begun):
    """Whoever's turn the next step is."""
    hooks.genlm_clear_kv_cache()
    (drawn,), (long,) = contexts(1, 10, 10, seed=1), contexts(1, 400, 400, seed=2)
    draw = SampleRequest(Query(drawn), SamplingParams(max_tokens=100, temperature=0.0))
    hooks.step(draw)
    hooks.step(Query(long))
    for _ in range(1, begun):
        hooks.step()
    with patch.object(hooks.model, "forward", wraps=hooks.model.forward) as forward:
        hooks.step(dropped=[Query(long)])
        for _ in range(30):
            hooks.step()
    assert {len(call.args[0]) for call in forward.call_args_list} == {1}
    hooks.step(dropped=[draw])
