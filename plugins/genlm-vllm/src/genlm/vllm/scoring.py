"""Scores of continuations, from the log-probabilities that vLLM gives for a prompt's tokens."""

from __future__ import annotations

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query, ScoreRequest, TokenIds
from genlm.vllm.internals import EngineCore

#: On a CPU, the row of a fork takes as long as so many tokens of a prompt more than a score's.
A_ROW = 3


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


def worth_scoring(request: ScoreRequest, core: EngineCore, known: bool) -> bool:
    """Whether this takes less than a row per token.

    vLLM reads no key/value state for a prompt whose log-probabilities are wanted: it computes the
    context again. Rows find all full blocks, and without forks each recomputes half a block on
    average. With ``logprobs_mode`` the user may have asked for logits.

    Args:
        request: What is asked.
        core: vLLM.
        known: Whether the context is computed anyhow.
    """
    context, continuation = request.query.length, len(request.continuation)
    by_rows = known and core.forks and core.device_type == "cpu"
    row = A_ROW if by_rows else core.block_size // 2
    return context < row * continuation and core.logprobs_mode.endswith("logprobs")
