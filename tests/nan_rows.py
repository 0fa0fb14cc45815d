"""Rows of an engine whose model has NaN in the state of one token, and rows beside these."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
import torch

from genlm.core import AsyncLM, EngineError

#: The token whose state is NaN, and the ids among which the others are chosen.
BAD, IDS = 99, range(1, 255)

#: The type of the rows, as errors name it.
DTYPE = "torch.float32"

Reference = Callable[[Sequence[int]], torch.Tensor]


def damage(model: torch.nn.Module) -> None:
    """Make the state of the token NaN."""
    (weight,) = (one for name, one in model.named_parameters() if "embed_tokens" in name)
    weight.data[BAD] = torch.inf


def reference_of(folder: str) -> Reference:
    """A function that gives transformers' row after a context, for a sound model."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def row(ids: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            found: torch.Tensor = model(torch.tensor([[*ids]])).logits[0, -1].log_softmax(-1)
        return found

    return row


def text(source: random.Random, length: int) -> list[int]:
    """Tokens without the one whose state is NaN."""
    return [token for token in source.choices(IDS, k=length) if token != BAD]


def gathered(*asked: Awaitable[Any]) -> list[Any]:
    """The result of each awaitable, or its error."""

    async def main() -> list[Any]:
        return await asyncio.gather(*asked, return_exceptions=True)

    return asyncio.run(main())


class NanRows:
    """Tests with the fixtures ``lm``, a damaged float32 model of bytes, and ``reference``, the rows
    of the sound one.

    Attributes:
        native_scores: How many scores of the test of scores the engine computes itself.
    """

    native_scores = 0

    @pytest.fixture(autouse=True)
    def _empty(self, lm: AsyncLM) -> None:
        lm.clear_kv_cache()

    def test_rows_beside_nan_and_after_it_are_right(
        self, lm: AsyncLM, reference: Reference
    ) -> None:
        """Contexts inside one with NaN, beside it, and later where its state was."""
        source = random.Random(0)
        for _ in range(12):
            one, other = text(source, source.randint(2, 100)), text(source, source.randint(2, 60))
            bad = [*one, BAD], [*one, BAD, *other]
            asked = [one, one[: len(one) // 2 + 1], *bad, [*one, *other]]
            source.shuffle(asked)
            rows = gathered(*map(lm.next_token_logprobs, asked))
            for ids, row in zip(asked, rows, strict=True):
                if BAD in ids:
                    assert isinstance(row, EngineError)
                    said = rf"row is NaN in {DTYPE} for the context .* of {len(ids)} tokens; look f"
                    assert re.search(said, str(row))
                else:
                    torch.testing.assert_close(row, reference(ids), atol=5e-4, rtol=0)

    def test_samples_and_scores_beside_nan_are_right(
        self, lm: AsyncLM, reference: Reference
    ) -> None:
        source = random.Random(2)
        one, other = text(source, 40), text(source, 30)
        tokens = text(source, 12)  # so many that an engine scores them itself
        prompts = one, [*one, BAD], other
        greedy = [lm.sample(ids, 3, [], temperature=0.0) for ids in prompts]
        at_random = [lm.sample(ids, 3, []) for ids in ([*other, BAD], other)]
        with_nan = [*tokens[:6], BAD, *tokens[6:]]
        pairs = (one, with_nan), (one, tokens), (other, tokens)
        scores = [lm.sequence_logprobs(*pair) for pair in pairs]
        first, none, second, none_too, drawn, no_score, *scored = gathered(
            *greedy, *at_random, *scores
        )
        for each in (none, none_too):
            said = rf"NaN in {DTYPE} in a draw after the context .* look for NaN"
            assert re.search(said, str(each))
        assert len(drawn) == 3
        said = rf"NaN in {DTYPE} for the score of token \d+ at position \d+, or .* of 53 tokens"
        assert re.search(said, str(no_score))
        assert lm.stats.scores >= self.native_scores
        for ids, found in ((one, first), (other, second)):
            for at, token in enumerate(found):
                assert int(reference([*ids, *found[:at]]).argmax()) == token
        for ids, score in zip((one, other), scored, strict=True):
            rows = [reference([*ids, *tokens[:at]]) for at in range(len(tokens))]
            expected = torch.stack([row[token] for row, token in zip(rows, tokens, strict=True)])
            torch.testing.assert_close(score, expected, atol=5e-4, rtol=0)

    def test_prompts_stay_pinned_when_one_has_nan(self, lm: AsyncLM, reference: Reference) -> None:
        source = random.Random(3)
        prompt, other = text(source, 70), text(source, 40)
        lm.cache_kv(prompt)
        with pytest.raises(EngineError, match=rf"row is NaN in {DTYPE} for the context"):
            lm.cache_kv([*other, BAD])
        with pytest.raises(EngineError, match="row is NaN"):
            lm.next_token_logprobs_sync([*prompt, BAD])
        lm.cache_kv(other)
        for ids in ([*prompt, 5], [*other, 5]):
            row = lm.next_token_logprobs_sync(ids)
            torch.testing.assert_close(row, reference(ids), atol=5e-4, rtol=0)
