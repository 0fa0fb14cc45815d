"""Choose the scores that cost an engine less as requests than as rows.

For engines that compute the log-probabilities of a prompt's tokens from a given position on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from genlm.core.types import Query, ScoreRequest
from genlm.kit.prefixes import common_length

#: On a CPU, one more row takes as long as this many more tokens.
ROW_COST_TOKENS = 3

#: Scores of fewer tokens than this are made from rows, because later requests can reuse the rows.
MIN_NATIVE_SCORE_TOKENS = 8


def cheaper_as_requests(scores: Sequence[ScoreRequest]) -> list[ScoreRequest]:
    """The scores, of those asked for together, that cost less as requests to the engine than as
    rows.

    A request computes all tokens that it scores, and one row. If scores are computed from rows,
    candidates with a common prefix share the rows of that prefix.
    """
    behind: dict[Query, list[ScoreRequest]] = {}
    for each in scores:
        if len(each.continuation) > 1:  # the first token's score comes from the context's row
            behind.setdefault(each.query, []).append(each)
    cheaper = [each for group in behind.values() if _cost_less(group) for each in group]
    tokens = sum(len(each.continuation) for each in cheaper)
    return cheaper if tokens >= MIN_NATIVE_SCORE_TOKENS else []


def _cost_less(group: Sequence[ScoreRequest]) -> bool:
    """Whether scoring candidates behind one context costs less than the rows that they need: the
    row of the context, and the rows of its extensions with which candidates begin."""
    known = sorted(each.continuation[:-1] for each in group)
    rows = 1 + sum(len(ids) - common_length(last, ids) for last, ids in pairwise([(), *known]))
    return ROW_COST_TOKENS * rows > sum(map(len, known)) + ROW_COST_TOKENS * len(group)
