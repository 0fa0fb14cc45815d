"""Scores of continuations, from the log-probabilities that vLLM gives for a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from genlm.core.errors import EngineError
from genlm.core.types import Query, ScoreRequest, TokenIds
from genlm.kit.scores import cheaper_as_requests as cheaper_by_tokens
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
        continuation: The tokens to score, of which there are several.
        row: ``[vocab_size]``, the row for the last of these tokens.
        prompt_logprobs: Of the prompt's last tokens.
    """
    if prompt_logprobs is None:
        return EngineError("vLLM gave no log-probabilities of the prompt; ask again")
    last = row[continuation[-1]].reshape(1)
    return torch.cat([prompt_logprobs[1 - len(continuation) :].to(last), last])


def cheaper_as_requests(scores: Sequence[ScoreRequest], core: EngineCore) -> list[ScoreRequest]:
    """Those that take less than rows.

    With forks, vLLM computes no more than the tokens that are scored. Without, it computes the
    context again, of which rows find all full blocks: each recomputes half a block on average.
    With ``logprobs_mode`` the user may have asked for logits.
    """
    if not core.logprobs_mode.endswith("logprobs"):
        return []
    if core.forks:
        return cheaper_by_tokens(scores)
    each_row = core.block_size // 2
    long = [each for each in scores if len(each.continuation) > 1]
    return [each for each in long if each.query.length < each_row * len(each.continuation)]
