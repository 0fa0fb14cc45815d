"""The real engine behind the core."""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from genlm.core import EngineError, UnsupportedError
from genlm.sgl import AsyncSGLTransformer


def test_a_request_that_fails_fails_alone(tiny, monkeypatch):
    contexts = [[1, 2, token] for token in range(3, 20)]
    with AsyncSGLTransformer.from_name(tiny, {"max_total_tokens": 1024}) as lm:
        rows = [lm.next_token_logprobs_uncached(context) for context in contexts]
        forward = lm.underlying_model.forward

        def fail_on_13(input_ids, *args, **kwargs):
            if 13 in input_ids.tolist():
                raise RuntimeError("unlucky")
            return forward(input_ids, *args, **kwargs)

        monkeypatch.setattr(lm.underlying_model, "forward", fail_on_13)
        with ThreadPoolExecutor(len(contexts)) as several:
            asked = [several.submit(lm.next_token_logprobs_sync, context) for context in contexts]
    for context, row, answer in zip(contexts, rows, asked, strict=True):
        if 13 in context:
            with pytest.raises(
                EngineError, match=r"\[1, 2, 13\] of 3 tokens: RuntimeError: unlucky"
            ):
                answer.result()
        else:
            torch.testing.assert_close(answer.result(), row, atol=1e-4, rtol=0)


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


def test_what_is_loaded_already_cannot_be_wrapped() -> None:
    with pytest.raises(UnsupportedError, match=r"AsyncSGLTransformer\.from_name\(name\)"):
        AsyncSGLTransformer(object(), object())
