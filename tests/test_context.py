from __future__ import annotations

import functools
import pickle

import pytest
import torch
from attrs import evolve

from genlm.core import InvalidQueryError, Query
from genlm.core.context import BLOCK_TOKENS, Context

LENGTHS = [
    1,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    2 * BLOCK_TOKENS,
    3 * BLOCK_TOKENS + 5,
]


def ids_of(length):
    return tuple(i * 7 % 250 for i in range(length))


def extended(ids, vocab_size):
    return Context(ids[:1], vocab_size).extend(*ids[1:])


@pytest.mark.parametrize("start", LENGTHS)
@pytest.mark.parametrize("more", LENGTHS)
def test_query_of_an_extended_context_equals_query_of_its_ids(start, more):
    whole = ids_of(start + more)
    context = Context(whole[:start], 258).extend(*whole[start:])
    carried, plain = Query(context), Query(whole)
    assert carried.length == len(whole)
    assert context.token_ids == whole
    assert carried == plain == carried
    assert carried != Query((*whole[:-1], 251)) != carried
    assert carried.token_ids == whole
    assert hash(carried) == hash(plain)
    one_by_one = functools.reduce(Context.extend, whole[start:], Context(whole[:start], 258))
    at_once = Context(whole, 258)
    assert at_once == one_by_one == context == at_once
    assert hash(one_by_one) == hash(at_once)
    assert list(one_by_one) == list(whole)


@pytest.mark.parametrize("ids", [(1, 2), Context((1, 2), 258)])
def test_derived_query_is_independent(ids):
    query = Query(ids)
    for made, same in [
        (evolve(query, token_ids=(1, 2, 3)), Query((1, 2, 3))),
        (query.extended((3,)), Query((1, 2, 3))),
        (evolve(query, cold=True), Query((1, 2), cold=True)),
    ]:
        assert made == same
        assert hash(made) == hash(same)
        assert made != query


@pytest.mark.parametrize(
    "other",
    [
        ids_of(3 * BLOCK_TOKENS + 5)[BLOCK_TOKENS:],
        (251, *ids_of(3 * BLOCK_TOKENS + 5)[1:]),
        ids_of(3 * BLOCK_TOKENS + 4),
    ],
    ids=["shorter", "another first token", "another end"],
)
def test_contexts_with_the_same_hash_are_compared(other):
    for make in (Context, extended):
        one, two = make(ids_of(3 * BLOCK_TOKENS + 5), 258), make(other, 258)
        two.hash_value = one.hash_value
        assert one != two
        assert two != one


@pytest.mark.parametrize("length", [1, 2, BLOCK_TOKENS, BLOCK_TOKENS + 3, 3 * BLOCK_TOKENS + 5])
def test_context_starts_with_its_first_ids_only(length):
    ids = ids_of(3 * BLOCK_TOKENS + 5)
    context = Context(ids, 258)
    assert context.starts_with(Context(ids[:length], 258))
    assert context.starts_with(context.first(length))
    other = Context((*ids[: length - 1], 257), 258)
    assert not context.starts_with(other)
    assert other.extend(1).starts_with(other)
    assert not other.extend(1).starts_with(other.first(length - 1).extend(1))


def test_a_long_context_can_be_pickled_and_let_go():
    context = Context((1,), 258)
    for _ in range(200):
        context = context.extend(*ids_of(BLOCK_TOKENS + 1))
    assert pickle.loads(pickle.dumps(context)) == context
    assert pickle.loads(pickle.dumps(Query(context))) == Query(context)


@pytest.mark.parametrize("length", LENGTHS)
def test_parts_are_the_ids_and_are_shared_with_extensions(length):
    context = Context(ids_of(length), 258)
    *whole, tail = context.parts()
    assert sum(whole, ()) + tail == context.token_ids
    shared = zip(whole, context.extend(7).parts(), strict=False)
    assert all(mine is its for mine, its in shared)


def test_context_is_accepted_wherever_token_ids_are(mock, gate):
    lm = mock()
    context = lm.context([1]).extend(2)
    row = lm.next_token_logprobs_sync(context)
    for same in (context, lm.context([1, 2]), [1, 2]):
        assert torch.equal(lm.batch_next_token_logprobs_sync([same])[0], row)
    assert gate.batches == [[(1, 2)]]
    assert torch.equal(lm.next_token_logprobs_uncached(context), row)
    assert lm.sample_sync(context, 3, [], seed=1) == lm.sample_sync([1, 2], 3, [], seed=1)
    scores = lm.sequence_logprobs_sync(context, [3, 4])
    assert torch.equal(scores, lm.sequence_logprobs_sync([1, 2], [3, 4]))
    lm.cache_kv(context)


def test_extension_with_invalid_ids_is_rejected(mock):
    context = mock().context([1])
    with pytest.raises(
        InvalidQueryError, match="token id 258 at position 1 of the extension is out of range"
    ):
        context.extend(2, 258)
    with pytest.raises(InvalidQueryError, match="the extension is empty"):
        context.extend()
    with pytest.raises(InvalidQueryError, match="the context is empty"):
        mock().context([])


@pytest.mark.parametrize(
    "context",
    [Context((300,), 1000), Context((300,)), Context(()), Context((1, 2), 258).first(0)],
)
def test_a_context_that_was_not_checked_for_this_model_is_checked_again(mock, context):
    with pytest.raises(InvalidQueryError, match=r"300 at position 0|is empty"):
        mock().next_token_logprobs_sync(context)


@pytest.mark.parametrize("length", LENGTHS)
def test_first_counts_tokens_as_a_slice_does(length):
    ids = ids_of(length)
    for context in (Context(ids, 258), Context(ids[:1], 258).followed_by(ids[1:])):
        for first in (0, 1, BLOCK_TOKENS, length, length + 1, -1, -BLOCK_TOKENS, -length - 1):
            assert context.first(first) == Context(ids[:first], 258)


def test_too_long_context_is_rejected(mock):
    lm = mock(max_context=2)
    context = lm.context([1, 2])
    lm.next_token_logprobs_sync(context)
    with pytest.raises(InvalidQueryError, match="the context of 3 tokens exceeds the 2 tokens"):
        lm.next_token_logprobs_sync(context.extend(3))


def test_context_is_a_sequence():
    context = Context((1, 2, 3), 258)
    assert (len(context), context[0], context[-1], context[1:]) == (3, 1, 3, (2, 3))
    assert list(context) == [1, 2, 3]
    assert 2 in context
    assert context != (1, 2, 3)
    assert repr(context) == "Context([1, 2, 3], 3 tokens)"
    assert repr(context.extend(*[0] * 5)) == "Context([1, 2, 3, 0, 0, 0, 0, 0], 8 tokens)"
    assert repr(context.extend(*[0] * 6)) == "Context([1, 2, 3, 0, 0, 0, 0, 0, ...], 9 tokens)"
