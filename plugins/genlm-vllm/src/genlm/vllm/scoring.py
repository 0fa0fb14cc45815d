"""Scores of continuations, from the log-probabilities that vLLM gives for a prompt's tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from genlm.core.types import Query, ScoreRequest, TokenIds
from genlm.kit.scores import cheaper_as_requests as cheaper_by_tokens
from genlm.vllm.internals import EngineCore
from genlm.vllm.transfer import to_device


def scored(request: ScoreRequest) -> Query:
    """The context and the continuation without its last token, which is no longer than the contexts
    of rows. The log-probability of the last token is read from the next row."""
    return request.query.extended(request.continuation[:-1])


def scores(
    finished: Sequence[tuple[TokenIds, torch.Tensor, torch.Tensor]],
) -> Sequence[torch.Tensor]:
    """``[len(continuation)]`` float32 for each score that a step has finished, on the device of its
    row, to which all are copied together.

    Args:
        finished: For each score: its continuation of several tokens; ``[vocab_size]``, the row for
            the last of them; and the log-probabilities of its prompt's last tokens, in the host's
            memory.
    """
    if not finished:
        return []
    sizes = [len(continuation) for continuation, _, _ in finished]
    known = torch.cat(
        [
            torch.nn.functional.pad(prompt_logprobs[1 - size :].float(), (0, 1))
            for size, (_, _, prompt_logprobs) in zip(sizes, finished, strict=True)
        ]
    )
    last = torch.stack([row[continuation[-1]] for continuation, row, _ in finished])
    joined = to_device(known, last.device)
    ends = [end - 1 for end in itertools.accumulate(sizes)]
    joined.index_copy_(0, to_device(ends, last.device), last)
    return torch.split(joined, sizes)


def cheaper_as_requests(scores: Sequence[ScoreRequest], core: EngineCore) -> list[ScoreRequest]:
    """The scores that are cheaper as vLLM requests than as rows.

    With forks, vLLM computes only the scored tokens. Without forks, it computes the context again,
    whereas rows find all full blocks of the context, and recompute half a block each on average.
    With ``logprobs_mode``, the user may have requested logits, which are no scores.
    """
    if not core.logprobs_mode.endswith("logprobs"):
        return []
    if core.forks:
        return cheaper_by_tokens(scores)
    each_row = core.block_size // 2
    long = [each for each in scores if len(each.continuation) > 1]
    return [each for each in long if each.query.length < each_row * len(each.continuation)]
