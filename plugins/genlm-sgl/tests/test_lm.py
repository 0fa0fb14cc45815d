"""The real engine behind the core."""

from __future__ import annotations

import itertools

import pytest
import torch

from genlm.core import EngineError, UnsupportedError
from genlm.sgl import AsyncSGLTransformer


def test_a_prompt_that_fails_in_the_middle_can_be_asked_again(tiny, contexts, monkeypatch):
    (context,) = contexts(1, 80, 80)
    with AsyncSGLTransformer.from_name(
        tiny, {"max_total_tokens": 1024, "chunked_prefill_size": 16}
    ) as lm:
        row = lm.next_token_logprobs_uncached(context)
        forward, chunks = lm.underlying_model.forward, itertools.count()

        def fail_once(*args, **kwargs):
            if next(chunks) == 2:
                raise RuntimeError("unlucky")
            return forward(*args, **kwargs)

        monkeypatch.setattr(lm.underlying_model, "forward", fail_once)
        with pytest.raises(EngineError, match="unlucky"):
            lm.next_token_logprobs_sync(context)
        torch.testing.assert_close(lm.next_token_logprobs_sync(context), row, atol=1e-4, rtol=0)


def test_loaded_model_cannot_be_wrapped() -> None:
    with pytest.raises(UnsupportedError, match=r"AsyncSGLTransformer\.from_name\(name\)"):
        AsyncSGLTransformer(object(), object())
