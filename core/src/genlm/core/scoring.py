"""Scores of continuations, and the windows in which a long text is scored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

#: A token with at least this log-probability is the most likely one, however its score was rounded,
#: so no row is needed.
MIN_GREEDY_LOGPROB: Final = -0.5


class Score(NamedTuple):
    """The score of a continuation, as lm-evaluation-harness needs it.

    Attributes:
        logprob: The continuation's log-probability given its context: the sum over its tokens, in
            nats.
        is_greedy: Whether greedy decoding gives the continuation: each of its tokens is the most
            likely one at its position (lowest id on a tie).
    """

    logprob: float
    is_greedy: bool


def rolling_windows(
    length: int, max_length: int, context_len: int, keep: int = 0
) -> Iterator[tuple[int, int, int]]:
    """The windows in which every token of a text but its first is scored once: where the context
    begins, the first token that is scored at once, and the end of these.

    Each has at most ``max_length`` tokens, without the last one that it scores: that needs no row
    of its own. After the first window each gives every token at least ``context_len`` tokens of
    context. The last one begins as early as it can. Each window after the first leaves room for the
    text's first ``keep`` tokens, which stand before it.

    Source: ``get_rolling_token_windows`` and ``make_disjoint_window`` of lm-evaluation-harness;
    its prefix token is the text's first one here.
    """
    end = min(length, max_length + 1)
    if end > 1:
        yield 0, 1, end
    while end < length:
        first, end = end, min(length, end + max_length - keep - context_len + 1)
        yield end - 1 - (max_length - keep), first, end
