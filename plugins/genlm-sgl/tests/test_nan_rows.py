"""Rows that are NaN, of a token whose state is. It spoils the state of tokens before it that are
computed in the same forward, and that other contexts would find."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
import torch

from genlm.core import EngineError
from genlm.sgl import AsyncSGLTransformer

from .conftest import TOKENS

#: A token whose state is NaN.
BAD = 99

DTYPE = "torch.float32"


@pytest.fixture(scope="module")
def reference(tiny_without_padding):
    """The row of transformers after a context."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_without_padding, dtype=torch.float32)

    def row(ids):
        with torch.no_grad():
            return model(torch.tensor([list(ids)])).logits[0, -1].log_softmax(-1)

    return row


@pytest.fixture(scope="module")
def lm(tiny_without_padding):
    options = {"dtype": "float32", "max_total_tokens": 4096}
    with AsyncSGLTransformer.from_name(
        tiny_without_padding, engine_opts=options, cache_size=0
    ) as lm:
        parameters = lm.underlying_model.named_parameters()
        (weight,) = (one for name, one in parameters if "embed_tokens" in name)
        weight.data[BAD] = torch.inf
        yield lm


@pytest.fixture(autouse=True)
def _empty(lm):
    lm.clear_kv_cache()


def text(source, length):
    return [token for token in source.choices(range(TOKENS - 1), k=length) if token != BAD]


def gathered(*asked):
    """The result of each awaitable, or its error."""

    async def main():
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(main())


def test_rows_beside_nan_and_after_it_are_right(lm, reference):
    """Those of contexts inside one with NaN, beside it, and later with the same beginning."""
    source = random.Random(0)
    for _ in range(12):
        one, other = text(source, source.randint(2, 100)), text(source, source.randint(2, 60))
        asked = [one, one[: len(one) // 2 + 1], [*one, BAD], [*one, BAD, *other], [*one, *other]]
        source.shuffle(asked)
        for ids, result in zip(asked, gathered(*map(lm.next_token_logprobs, asked)), strict=True):
            if BAD in ids:
                assert isinstance(result, EngineError)
                said = rf"row is NaN in {DTYPE} for the context .* of {len(ids)} tokens; look for N"
                assert re.search(said, str(result))
            else:
                torch.testing.assert_close(result, reference(ids), atol=5e-4, rtol=0)


def test_nan_of_a_token_leaves_the_state_before_it_right(lm, reference):
    whole = text(random.Random(1), 70)
    for cut in (40, 60):
        with pytest.raises(EngineError, match="row is NaN"):
            lm.next_token_logprobs_sync([*whole[:cut], BAD, 1])
        for length in (20, cut, cut + 5):
            row = lm.next_token_logprobs_sync(whole[:length])
            torch.testing.assert_close(row, reference(whole[:length]), atol=5e-4, rtol=0)


def test_draws_and_scores_beside_nan_are_right(lm, reference):
    source = random.Random(2)
    one, other, tokens = (text(source, length) for length in (40, 30, 12))
    draws = [lm.sample(ids, 3, [], temperature=0.0) for ids in (one, [*one, BAD], other)]
    draws += [lm.sample(ids, 3, []) for ids in ([*other, BAD], other)]
    scores = [
        lm.sequence_logprobs(ids, continuation)
        for ids, continuation in ((one, [*tokens[:6], BAD, *tokens[6:]]), (other, tokens))
    ]
    drawn, no_draw, drawn_too, no_draw_too, at_random, no_score, score = gathered(*draws, *scores)
    for each in (no_draw, no_draw_too):
        assert re.search(rf"NaN in {DTYPE} in a draw after the context .* look for NaN", str(each))
    assert len(at_random) == 3
    assert re.search(rf"NaN in {DTYPE} for the score of token \d+ at position", str(no_score))
    for ids, found in ((one, drawn), (other, drawn_too)):
        for at, token in enumerate(found):
            assert int(reference([*ids, *found[:at]]).argmax()) == token
    rows = [reference([*other, *tokens[:at]]) for at in range(len(tokens))]
    expected = torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])
    torch.testing.assert_close(score, expected, atol=5e-4, rtol=0)


def test_prompts_stay_pinned_when_one_has_nan(lm, reference):
    source = random.Random(3)
    prompt, other = text(source, 70), text(source, 40)
    lm.cache_kv(prompt)
    with pytest.raises(EngineError, match=rf"row is NaN in {DTYPE} for the context"):
        lm.cache_kv([*other, BAD])
    with pytest.raises(EngineError, match="row is NaN"):
        lm.next_token_logprobs_sync([*prompt, BAD])
    lm.cache_kv(other)
    for ids in ([*prompt, 5], [*other, 5]):
        torch.testing.assert_close(
            lm.next_token_logprobs_sync(ids), reference(ids), atol=5e-4, rtol=0
        )
