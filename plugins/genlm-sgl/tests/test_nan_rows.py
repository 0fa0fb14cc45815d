"""Rows that are NaN, of a token whose state is. It spoils the state of tokens before it that are
computed in the same forward, and that other contexts would find."""

from __future__ import annotations

import random

import pytest
import torch

from genlm.core import EngineError
from genlm.sgl import AsyncSGLTransformer
from tests.nan_rows import BAD, NanRows, damage, reference_of, text


@pytest.fixture(scope="module")
def reference(tiny_without_padding):
    return reference_of(tiny_without_padding)


@pytest.fixture(scope="module")
def lm(tiny_without_padding):
    options = {"dtype": "float32", "max_total_tokens": 4096}
    with AsyncSGLTransformer.from_name(
        tiny_without_padding, engine_opts=options, cache_size=0
    ) as lm:
        damage(lm.underlying_model)
        yield lm


class TestNanRows(NanRows):
    def test_nan_of_a_token_leaves_the_state_before_it_right(self, lm, reference):
        whole = text(random.Random(1), 70)
        for cut in (40, 60):
            with pytest.raises(EngineError, match="row is NaN"):
                lm.next_token_logprobs_sync([*whole[:cut], BAD, 1])
            for length in (20, cut, cut + 5):
                row = lm.next_token_logprobs_sync(whole[:length])
                torch.testing.assert_close(row, reference(whole[:length]), atol=5e-4, rtol=0)
