"""Requests that wait for one with a common prefix, tested without an engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.kit.new_requests import MIN_TOKENS_TO_WAIT, Leaders, tokens_per_forward
from genlm.kit.prefixes import key_of

TOKENS_PER_FORWARD = 40
START = tuple(range(20))


def keys(*contexts, version=0):
    return {ids: key_of(version, ids) for ids in contexts}


def nothing(one, shared):
    return 0


def test_prefixes_wait_for_the_longest_request():
    new = keys(*(START[:length] for length in range(1, 21)))
    wait = Leaders(TOKENS_PER_FORWARD).waiting({}, new, nothing)
    assert wait == {ids for ids in new if MIN_TOKENS_TO_WAIT < len(ids) < 20}


def test_requests_do_not_wait_if_they_save_less_than_a_forward():
    new = keys(*((*START, last) for last in range(2)))
    assert not Leaders(TOKENS_PER_FORWARD).waiting({}, new, nothing), "it saves 20 tokens"
    assert Leaders(20).waiting({}, new, nothing)
    assert tokens_per_forward("cuda") > tokens_per_forward("cpu") == TOKENS_PER_FORWARD


def test_request_does_not_wait_for_few_tokens():
    new = keys(*((*START, last) for last in range(60)))
    assert not Leaders(TOKENS_PER_FORWARD).waiting(
        {}, new, lambda one, shared: shared - MIN_TOKENS_TO_WAIT + 1
    )
    assert Leaders(TOKENS_PER_FORWARD).waiting(
        {}, new, lambda one, shared: shared - MIN_TOKENS_TO_WAIT
    )


def test_another_adapter_begins_otherwise():
    new = {(version, last): key_of(version, (*START, last)) for version, last in [
        (0, 1), (1, 2), (2, 3), (3, 4)
    ]}  # fmt: skip
    assert not Leaders(1).waiting({}, new, nothing)


def test_requests_wait_for_a_begun_request_until_it_ends():
    leaders: Leaders = Leaders(TOKENS_PER_FORWARD)
    begun, new = keys((*START, 1)), keys((*START, 2), (*START, 3))
    for _ in range(3):
        assert leaders.waiting(begun, new, nothing) == {*new}
    assert not leaders.waiting(begun, new, lambda one, shared: shared)
    assert not leaders.waiting({}, {}, nothing)


@pytest.mark.parametrize("fate", ["does not begin", "leaves", "is preempted"])
def test_request_that_waited_in_vain_does_not_wait_again(fate):
    """The longest request came last, so there may be no room for it, although there is room for
    others."""
    leaders: Leaders = Leaders(TOKENS_PER_FORWARD)
    new = keys(*((*START, last) for last in range(5)), (*START, 5, 6, 7))
    *others, first = new
    assert leaders.waiting({}, new, nothing) == {*others}
    left = {one: new[one] for one in others}
    if fate != "does not begin":
        assert leaders.waiting({first: new[first]}, left, nothing) == {*others}
    assert not leaders.waiting({}, left if fate == "leaves" else new, nothing) & {others[0]}


def test_requests_wait_for_an_earlier_one_that_has_not_begun():
    """This happens if a step has no room for all prompts."""
    leaders: Leaders = Leaders(TOKENS_PER_FORWARD)
    first, *others = new = keys(*((*START, last) for last in range(5)))
    for _ in range(3):
        assert leaders.waiting({}, new, nothing) == {*others}
    assert leaders.waiting({first: b""}, keys(*others), lambda one, shared: shared) == set()


def test_request_with_a_longer_known_prefix_waits_for_the_next():
    """Each branch of a prefix tree is computed once."""
    leaders: Leaders = Leaders(10)
    branches = [[(*START, n, *range(30, 50), last) for last in (1, 2)] for n in (1, 2)]
    new = keys(*branches[0], *branches[1])
    assert leaders.waiting({}, new, nothing) == {*new} - {branches[0][0]}
    left = keys(*branches[1])
    assert len(leaders.waiting({}, left, lambda one, shared: 20)) == 1


def test_requests_do_not_wait_in_turn_if_the_prefix_is_not_kept():
    leaders: Leaders = Leaders(TOKENS_PER_FORWARD)
    new = keys(*((*START, last) for last in range(9)))
    others = [*new][1:]
    assert leaders.waiting({}, new, nothing) == {*others}
    assert leaders.waiting({}, keys(*others), nothing) == set()


contexts = st.lists(st.integers(0, 1), min_size=1, max_size=30).map(tuple)


@given(st.sets(contexts, min_size=1, max_size=20), st.integers(0, 60), st.integers(1, 8), st.data())
def test_every_request_is_eventually_released(new, least_saved, each, data):
    """One that is let go may begin, or be sent back; those that begin end some time."""
    leaders: Leaders = Leaders(least_saved, each)
    waiting, begun, steps = keys(*sorted(new)), {}, 0
    computed: set = set()

    def known(one, shared):
        return max([length for length in range(shared + 1) if one[:length] in computed], default=0)

    while waiting:
        wait = leaders.waiting(begun, waiting, known)
        assert wait < {*waiting, *begun}
        steps += 1
        assert steps < 40 * (len(new) + 1)
        for one in [*begun]:
            fate = data.draw(st.sampled_from(["goes on", "ends", "preempted", "dropped"]))
            if fate == "ends":
                computed |= {one[:length] for length in range(len(one) + 1)}
            if fate != "goes on" or steps % 5 == 0:
                key = begun.pop(one)
                if fate == "preempted" and steps < 10 * len(new):
                    waiting[one] = key
        for one in [one for one in waiting if one not in wait]:
            if data.draw(st.booleans()) or steps > 10 * len(new):
                begun[one] = waiting.pop(one)
