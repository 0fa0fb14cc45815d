"""Scores of continuations, from the log-probabilities that vLLM gives for a prompt's tokens."""

from __future__ import annotations

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query, ScoreRequest, TokenIds
from genlm.vllm.internals import EngineCore


def scored(request: ScoreRequest) -> Query:
    """The context and the continuation without its last token: not longer than for rows. The last
    token's log-probability is read from the next row."""
    return request.query.extended(request.continuation[:-1])


def scores(
    continuation: TokenIds, row: torch.Tensor, prompt_logprobs: torch.Tensor | None
) -> torch.Tensor | EngineError:
    """``[len(continuation)]`` float32, or the error if vLLM gave nothing to make them of.

    Args:
        continuation: The tokens to score.
        row: ``[vocab_size]``, the row for the last of these tokens.
        prompt_logprobs: Of the prompt's tokens from the second on; a continuation of one token
            needs none.
    """
    last = row[continuation[-1]].reshape(1)
    if len(continuation) == 1:
        return last
    if prompt_logprobs is None:
        return EngineError("vLLM gave no log-probabilities of the prompt; ask again")
    return torch.cat([prompt_logprobs[1 - len(continuation) :].to(last), last])


def worth_scoring(request: ScoreRequest, core: EngineCore) -> bool:
    """Whether this takes less than a row per token.

    vLLM reads no key/value state for a prompt whose log-probabilities are wanted: it computes the
    context again. Rows find all full blocks, and each recomputes half a block on average. With
    ``logprobs_mode`` the user may have asked for logits.
    """
    context, continuation = request.query.length, len(request.continuation)
    return context < core.block_size // 2 * continuation and core.logprobs_mode.endswith("logprobs")
