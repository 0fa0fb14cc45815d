"""Each score is read once, from the row of the tokens before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from genlm.core import Adapter, Query
from genlm.core.types import TokenIds
from genlm.kit.kv.scored import ScoredRows, scored_sequences

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=7).map(tuple)
ADAPTERS = st.sampled_from([None, Adapter("a", "folder", 1)])
ASKED = st.lists(st.tuples(TOKENS, TOKENS, ADAPTERS), min_size=1, max_size=12)


@given(ASKED)
def test_every_score_is_read_once_from_its_row(asked: list[tuple[TokenIds, TokenIds, Adapter]]):
    queries = [Query(context, adapter) for context, _, adapter in asked]
    continuations = [continuation for _, continuation, _ in asked]
    wanted = ScoredRows(scored_sequences(queries, continuations), continuations)
    assert len({piece.key for piece in wanted.pieces}) == len(wanted.pieces), "distinct"
    computed = [
        (number, piece.adapter, piece.tokens.token_ids[: stop + 1])
        for number, piece in enumerate(wanted.pieces)
        for stop in range(piece.latest_start, piece.length)
    ]
    rows, tokens, scores = wanted.read([number for number, *_ in computed])
    given = {
        score: (*computed[row][1:], token)
        for row, token, score in zip(rows, tokens, scores, strict=True)
    }
    expected = [
        (query.adapter, (*query.token_ids, *continuation[:at]), continuation[at])
        for query, continuation in zip(queries, continuations, strict=True)
        for at in range(len(continuation))
    ]
    assert len(scores) == len(expected)
    assert [given[score] for score in range(len(expected))] == expected


def test_common_prefix_of_candidates_is_computed_once() -> None:
    common, ends = (1, 2, 3), [(4, 5, 6), (4, 7), (8, 9), (4, 5)]
    continuations = [(*common, *end) for end in ends]
    wanted = ScoredRows(scored_sequences([Query((0,))] * 4, continuations), continuations)
    own = {piece.tokens.token_ids: piece.keep for piece in wanted.pieces}
    assert own == {(0, 1, 2, 3, 4, 5): 6, (0, 1, 2, 3, 8): 1}, "two are inside of the longest"
