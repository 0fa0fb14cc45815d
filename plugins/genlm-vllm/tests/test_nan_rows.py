"""Rows that are NaN, of a token whose state is. On a CPU, vLLM's attention also reads places behind
the end of a context, where state with NaN of an earlier context may be."""

from __future__ import annotations

import asyncio
import random
import re

import pytest
import torch

from genlm.core import EngineError, Query
from genlm.vllm import AsyncVirtualLM

from .driven import SMALL

#: A token whose state is NaN.
BAD = 99

DTYPE = "torch.float32"


def damage(model):
    (weight,) = (one for name, one in model.named_parameters() if "embed_tokens" in name)
    weight.data[BAD] = torch.inf


@pytest.fixture(scope="module")
def reference(bytes_path):
    """The row of transformers after a context."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(bytes_path, dtype=torch.float32)

    def row(ids):
        with torch.no_grad():
            return model(torch.tensor([list(ids)])).logits[0, -1].log_softmax(-1)

    return row


@pytest.fixture(scope="module", params=[True, False], ids=["live", "not live"])
def lm(bytes_path, request):
    with AsyncVirtualLM.from_name(
        bytes_path, engine_opts=SMALL, live_sessions=request.param, cache_size=0
    ) as lm:
        damage(lm.underlying_model)
        yield lm


@pytest.fixture(autouse=True)
def _empty(lm):
    lm.clear_kv_cache()


def text(source, length):
    return [token for token in source.choices(range(1, 256), k=length) if token != BAD]


def gathered(*asked):
    """The result of each awaitable, or its error."""

    async def main():
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(main())


def test_rows_beside_nan_and_after_it_are_right(lm, reference):
    """Those of contexts inside one with NaN, beside it, and later in the places of its state."""
    source = random.Random(0)
    for _ in range(12):
        one, other = text(source, source.randint(2, 100)), text(source, source.randint(2, 60))
        asked = [one, one[: len(one) // 2 + 1], [*one, BAD], [*one, BAD, *other], [*one, *other]]
        source.shuffle(asked)
        for ids, result in zip(asked, gathered(*map(lm.next_token_logprobs, asked)), strict=True):
            if BAD in ids:
                assert isinstance(result, EngineError)
                assert re.search(
                    rf"row is NaN in {DTYPE} for the context .* of {len(ids)} tokens; look for NaN "
                    "among its weights",
                    str(result),
                )
            else:
                torch.testing.assert_close(result, reference(ids), atol=5e-4, rtol=0)


def test_nan_that_a_dropped_request_left_behind_spoils_no_row(bytes_path, load_briefly, reference):
    """Nobody has seen its row, so the first one that is spoilt by its state is computed again."""
    engine, source = load_briefly(bytes_path), random.Random(1)
    damage(engine.model)
    prompt = text(source, 100)
    broken = Query((*prompt, BAD, *text(source, 90)))
    assert engine.step(broken) == engine.step() == {}, "two of its three parts are computed"
    engine.step(dropped=[broken])
    for length in (40, 70, 100, 101, 130):
        ids = [*prompt, *text(source, 40)][:length]
        (row,) = engine.ask(Query(tuple(ids)))
        torch.testing.assert_close(row, reference(ids), atol=5e-4, rtol=0)


def test_draws_and_scores_beside_nan_are_right(lm, reference):
    source = random.Random(2)
    one, other = text(source, 40), text(source, 30)
    draws = [lm.sample(ids, 3, [], temperature=0.0) for ids in (one, [*one, BAD], other)]
    tokens = text(source, 12)  # so many that vLLM scores them itself
    scores = [
        lm.sequence_logprobs(ids, continuation)
        for ids, continuation in (
            (one, [*tokens[:6], BAD, *tokens[6:]]),
            (one, tokens),
            (other, tokens),
        )
    ]
    *drawn, no_score, score, other_score = gathered(*draws, *scores)
    said = rf"NaN in {DTYPE} in a draw after the context .* of 41 tokens; look for NaN"
    assert re.search(said, str(drawn[1]))
    said = rf"NaN in {DTYPE} for the score of token \d+ at position \d+, or .* of 53 tokens; look"
    assert re.search(said, str(no_score))
    assert lm.stats.scores >= 2, "vLLM's own"
    for ids, found in ((one, drawn[0]), (other, drawn[2])):
        for at, token in enumerate(found):
            assert int(reference([*ids, *found[:at]]).argmax()) == token
    for ids, given in ((one, score), (other, other_score)):
        rows = [reference([*ids, *tokens[:at]]) for at in range(len(tokens))]
        expected = torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])
        torch.testing.assert_close(given, expected, atol=5e-4, rtol=0)


def test_prompts_stay_pinned_when_one_has_nan(lm, reference):
    source = random.Random(3)
    prompt, other = text(source, 70), text(source, 40)
    lm.cache_kv(prompt)
    with pytest.raises(EngineError, match=rf"row is NaN in {DTYPE} for the context .* 41 tokens"):
        lm.cache_kv([*other, BAD])
    with pytest.raises(EngineError, match="row is NaN"):
        lm.next_token_logprobs_sync([*prompt, BAD])
    lm.cache_kv(other)
    for ids in ([*prompt, 5], [*other, 5]):
        torch.testing.assert_close(
            lm.next_token_logprobs_sync(ids), reference(ids), atol=5e-4, rtol=0
        )
