"""Scores of continuations, by the log-probabilities that vLLM gives of a prompt's tokens."""

from __future__ import annotations

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query, ScoreRequest
from genlm.vllm.internals import EngineCore, TokenIds


def scored(request: ScoreRequest) -> Query:
    """The context and all of the continuation but its last token: as short as if rows were asked.
    The last token's log-probability is read from the row that follows."""
    query = request.query
    return Query(query.token_ids + request.continuation[:-1], query.adapter)


def scores(
    continuation: TokenIds, row: torch.Tensor, prompt_logprobs: torch.Tensor | None
) -> torch.Tensor:
    """``[len(continuation)]`` float32.

    Args:
        continuation: The tokens to score.
        row: ``[vocab_size]``, of what follows all but the last of them.
        prompt_logprobs: Of the prompt's tokens from the second on; a continuation of one token
            needs none.

    Raises:
        EngineError: vLLM gave none, though they are needed.
    """
    last = row[continuation[-1]].reshape(1)
    if len(continuation) == 1:
        return last
    if prompt_logprobs is None:
        raise EngineError("vLLM gave no log-probabilities of the prompt; ask again")
    return torch.cat([prompt_logprobs[1 - len(continuation) :].to(last), last])


def worth_scoring(request: ScoreRequest, core: EngineCore) -> bool:
    """Whether this takes less than a row per token.

    vLLM reads no key/value state for a prompt whose log-probabilities are wanted: the context is
    computed anew. Rows find all full blocks, and recompute half a block each on average. With
    ``logprobs_mode`` the user may have asked for logits.
    """
    context, continuation = len(request.query.token_ids), len(request.continuation)
    return context < core.block_size // 2 * continuation and core.logprobs_mode.endswith("logprobs")
