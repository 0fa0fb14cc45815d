"""Scores of continuations, by the log-probabilities that vLLM gives of a prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from attrs import frozen

from genlm.core.errors import EngineError
from genlm.core.types import Answer, Query
from genlm.vllm.flights import Flight
from genlm.vllm.internals import EngineCore, TokenIds
from genlm.vllm.sampling import row_params


@frozen(eq=False)
class Score:
    """One continuation to score.

    Attributes:
        flight: A request whose prompt is the context with all of the continuation but its last
            token, so that it is as short as if rows were asked. The last token's log-probability is
            read from the row that follows.
        continuation: The tokens to score.
    """

    flight: Flight
    continuation: Sequence[int]

    @property
    def params(self) -> Any:
        """vLLM's. A continuation of one token needs the row alone."""
        return row_params(self.flight.key, scores=len(self.continuation) > 1)

    def result(self, answer: Answer) -> torch.Tensor:
        """``[len(continuation)]`` float32, from the request's row.

        Raises:
            Exception: the one in the row's place.
        """
        if isinstance(answer.row, Exception):
            raise answer.row
        last: torch.Tensor = answer.row[self.continuation[-1]].reshape(1)
        if len(self.continuation) == 1:
            return last
        if self.flight.prompt_logprobs is None:
            raise EngineError("vLLM gave no log-probabilities of the prompt")
        return torch.cat([self.flight.prompt_logprobs[1 - len(self.continuation) :].to(last), last])


def scored(query: Query, continuation: Sequence[int]) -> Query:
    """The context and all of the continuation but its last token."""
    return Query(query.token_ids + tuple(continuation[:-1]), query.adapter)


def worth_scoring(
    contexts: Sequence[TokenIds], continuations: Sequence[Sequence[int]], core: EngineCore
) -> bool:
    """Whether this takes less than a row per token.

    vLLM reads no key/value state for a prompt whose log-probabilities are wanted: every context is
    computed anew. Rows find all full blocks, and recompute half a block each on average. With
    ``logprobs_mode`` the user may have asked for logits.
    """
    context = sum(map(len, contexts))
    return context < core.block_size // 2 * sum(
        map(len, continuations)
    ) and core.logprobs_mode.endswith("logprobs")
