"""Lists of token ids that extend an earlier one are recognised, and give the right context."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from genlm.core import InvalidQueryError
from genlm.core.context import BLOCK_TOKENS, Context
from genlm.core.known_contexts import ENDING_TOKENS, KnownContexts

LONG = [at * 7 % 250 for at in range(2 * BLOCK_TOKENS + 5)]

#: Lists of few different ids, so that many have equal ends, with lengths around every multiple of a
#: block.
LISTS = st.builds(
    lambda first, more, end: [first, *[1] * (BLOCK_TOKENS * more + end)],
    st.integers(0, 2), st.integers(1, 2), st.integers(-2, 2 + ENDING_TOKENS),
)  # fmt: skip


@given(st.lists(st.tuples(LISTS, st.lists(st.integers(0, 2), max_size=2)), max_size=12))
def test_a_list_is_the_context_of_its_ids(asked):
    known, kept = KnownContexts(), []
    for start, more in asked:
        ids = [*start, *more]
        context = known.find(ids, 258)
        if context is None:
            context = Context(tuple(ids), 258)
            known.add(context)
        assert context == Context(tuple(ids), 258)
        assert context.token_ids == tuple(ids)
        assert hash(context) == hash(Context(tuple(ids), 258))
        kept.append(context)


def test_list_with_one_token_more_is_found_while_its_parent_lives(mock):
    lm = mock()
    first = lm.context(LONG)
    assert lm.context(LONG) is first
    longer = lm.context([*LONG, 5])
    assert (longer.grown, longer.parent_hash) == (1, first.hash_value)
    assert lm.context(tuple([*LONG, 5, 6])).grown == 1
    assert lm.context([*LONG, 7, 8]).grown == 0  # its parent is unknown
    assert lm.context([251, *LONG[1:], 5]).grown == 0
    del first, longer
    gc.collect()
    assert lm.context([*LONG, 5]).grown == 0


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([*LONG, 258], f"token id 258 at position {len(LONG)} of the context is out of range"),
        ([*LONG, -1], f"token id -1 at position {len(LONG)} of the context is out of range"),
        ([*LONG, 1.0], f"position {len(LONG)} of the context is 1.0"),
        ([*LONG, True], f"position {len(LONG)} of the context is True"),
        ([float(token_id) for token_id in LONG], r"position 0 of the context is 0\.0"),
        ([*LONG, [5]], f"position {len(LONG)} of the context is .*a list in place of an id"),
        ([*LONG[:3], [5], *LONG[4:]], "position 3 of the context is .*a list in place of an id"),
        ([*LONG[:3], float(LONG[3]), *LONG[4:]], r"position 3 of the context is 21\.0"),
        ([False, *LONG[1:], 5], "position 0 of the context is False"),
        ([*LONG[:3], np.zeros(2), *LONG[4:]], "position 3 of the context is array"),
    ],
)
def test_invalid_ids_in_a_known_list_are_rejected(ids, message, mock):
    lm = mock()
    known = lm.context(LONG)
    with pytest.raises(InvalidQueryError, match=message):
        lm.next_token_logprobs_sync(ids)
    assert lm.context(LONG) is known


def test_the_limit_holds_for_a_list_with_one_token_more(mock):
    lm = mock(max_context=len(LONG))
    known = lm.context(LONG)
    with pytest.raises(InvalidQueryError, match=f"of {len(LONG) + 1} tokens exceeds the"):
        lm.next_token_logprobs_sync([*LONG, 5])
    assert lm.context(LONG) is known


@pytest.mark.parametrize("kind", [np.array, torch.tensor, lambda ids: [*map(np.int64, ids)], iter])
def test_other_kinds_of_ids_are_read_as_before(kind, mock):
    lm = mock()
    known = lm.context(LONG)
    assert lm.context(kind(LONG)) == known
    assert {*map(type, lm.context(kind([*LONG, 5])))} == {int}
