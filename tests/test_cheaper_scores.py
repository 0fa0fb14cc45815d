"""The scores that are requested from an engine, tested without an engine."""

from __future__ import annotations

import pytest

from genlm.core.types import Query, ScoreRequest
from genlm.kit.scores import cheaper_as_requests

CONTEXT = Query(tuple(range(20)))


def lists(count, length, start=()):
    return [(*start, *range(n * 100, n * 100 + length)) for n in range(1, count + 1)]


@pytest.mark.parametrize(
    ("candidates", "native"),
    [
        ([], True),
        (lists(1, 8), True),
        (lists(1, 7), False),  # few tokens
        (lists(4, 3), True),
        (lists(9, 1), False),  # all of them read one row
        (lists(9, 1, start=range(8)), False),  # nine rows are enough for all
        (lists(9, 5, start=range(3)), True),
        (lists(9, 5, start=range(20)), False),
    ],
)
def test_candidates_that_share_rows_are_scored_from_rows(candidates, native):
    scores = [ScoreRequest(CONTEXT, each) for each in candidates]
    assert cheaper_as_requests(scores) == scores * native


def test_each_context_is_weighed_separately():
    alike = [ScoreRequest(CONTEXT, each) for each in lists(9, 1, start=range(8))]
    others = [ScoreRequest(Query((n,)), tuple(range(5))) for n in range(2)]
    assert cheaper_as_requests([*alike, *others]) == others


def test_a_single_token_is_left_to_the_row_of_the_context():
    long, single = ScoreRequest(CONTEXT, tuple(range(9))), ScoreRequest(CONTEXT, (5,))
    assert cheaper_as_requests([single, long]) == [long]
