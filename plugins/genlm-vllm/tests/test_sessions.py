"""The records of the live sessions, without vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.context import Context
from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Query
from genlm.vllm.sessions import Session, Sessions

A = Adapter("a", "/a", 1)
BLOCK = 4


def footprint(length: int) -> int:
    return (length // BLOCK + 1) * BLOCK


def books(limit: int = 4, capacity: int = 1000, longest: int = 40, reach: int = BLOCK) -> Sessions:
    return Sessions(
        limit=limit, capacity=capacity, footprint=footprint, longest=longest, reach=reach
    )


def session(*ids: int, adapter: Adapter | None = None, request_id: str = "") -> Session:
    return Session(request_id or f"r{ids}", Query(ids, adapter), footprint(len(ids)))


def test_an_extension_takes_the_session_once():
    sessions = books()
    sessions.park(session(1, 2, 3))
    assert sessions.take(Query((1, 2, 3, 4))) == session(1, 2, 3)
    assert sessions.take(Query((1, 2, 3, 5))) is None


def test_the_longest_prefix_within_reach_is_taken():
    sessions = books()
    for ids in [(1,), (1, 2), (1, 2, 3, 9)]:
        sessions.park(session(*ids))
    assert sessions.take(Query((1, 2, 3, 4, 5))) == session(1, 2)
    assert sessions.take(Query((1, 7, 7, 7, 7, 7))) is None, (
        "five new tokens are beyond the reach of four"
    )


def test_a_context_does_not_extend_itself_or_another_adapters():
    sessions = books()
    sessions.park(session(1, 2, adapter=A))
    assert sessions.take(Query((1, 2), A)) is None
    assert sessions.take(Query((1, 2, 3))) is None
    assert sessions.take(Query((1, 2, 3), A)) is not None


def test_a_twin_is_replaced():
    sessions = books()
    sessions.park(session(1, request_id="old"))
    assert sessions.park(session(1, request_id="new")) == [session(1, request_id="old")]
    assert len(sessions) == 1


def test_the_least_recently_used_go_first():
    sessions = books(limit=2)
    for first in range(4):
        sessions.park(session(first))
    assert sessions.trim(0) == [session(0), session(1)]


def test_sessions_give_way_to_what_is_in_flight():
    sessions = books(capacity=3 * BLOCK)
    for first in range(3):
        sessions.park(session(first))
    assert sessions.trim(0) == []
    assert sessions.trim(2 * BLOCK) == [session(0), session(1)]
    assert sessions.trim(100 * BLOCK) == [session(2)]


def test_a_pinned_context_is_never_taken_or_trimmed():
    sessions = books(capacity=60, longest=40)
    sessions.pin(session(1, 2, 3))
    assert sessions.is_pinned(Query((1, 2, 3)))
    assert sessions.take(Query((1, 2, 3, 4))) is None
    assert sessions.trim(10_000) == []
    assert sessions.pinned == [Query((1, 2, 3))]


def test_pinning_leaves_room_for_the_longest_context():
    sessions = books(capacity=60, longest=40)
    with pytest.raises(EngineError, match="kv_cache_memory_bytes"):
        sessions.check_room_for_pin(Query(tuple(range(20))))


def test_pinning_leaves_places_for_other_requests():
    sessions = books(limit=1)
    sessions.pin(session(1))
    with pytest.raises(EngineError, match="max_num_seqs"):
        sessions.check_room_for_pin(Query((2,)))


def test_dropping_an_adapter_leaves_the_others():
    sessions = books()
    sessions.pin(session(1, adapter=A))
    sessions.park(session(2, adapter=A))
    sessions.park(session(3))
    assert sessions.drop(A) == [session(1, adapter=A), session(2, adapter=A)]
    assert sessions.clear() == [session(3)]
    assert len(sessions) == 0


contexts = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
deeds = st.lists(
    st.tuples(
        st.sampled_from(["park", "take", "trim", "pin", "drop", "clear"]),
        contexts,
        st.sampled_from([None, A]),
    ),
    max_size=60,
)


@given(deeds, st.integers(0, 5))
def test_every_session_is_either_held_or_given_up_once(deeds, limit):
    """Against a plain dict by request id: none is lost, none given up twice, a trim gives up what
    is beyond the limits, and no more, and the longest one within reach is taken."""
    sessions, held, pinned = books(limit=limit, capacity=80), {}, set()

    def given_up(released):
        ids = [one.request_id for one in released]
        assert len(set(ids)) == len(ids)
        return [held.pop(each).tokens for each in ids]

    def within_reach(query):
        return [
            each.query.length
            for each in held.values()
            if each.request_id not in pinned
            and 0 < query.length - each.query.length <= BLOCK
            and each.query == Query(query.context.first(each.query.length), query.adapter)
        ]

    for number, (deed, ids, adapter) in enumerate(deeds):
        new = session(*ids, adapter=adapter, request_id=f"r{number}")
        if deed == "park":
            given_up(sessions.park(new))
            held[new.request_id] = new
        elif deed == "pin" and not sessions.is_pinned(new.query):
            sessions.pin(new)
            held[new.request_id] = new
            pinned.add(new.request_id)
        elif deed == "take":
            # As a context that knows its parent, and as one that does not.
            query = Query(Context(ids[:1], 3).followed_by(ids[1:]), adapter)
            lengths = within_reach(query)
            taken = sessions.take(query if number % 2 else new.query)
            assert (taken.query.length if taken else 0) == max(lengths, default=0)
            if taken:
                assert taken.query == Query(ids[: taken.query.length], adapter)
                given_up([taken])
        elif deed == "trim":
            *_, last = 0, *given_up(sessions.trim(len(ids)))
            used = sum(each.tokens for each in held.values()) + len(ids)
            assert len(sessions) == len(sessions.pinned) or (used <= 80 and len(sessions) <= limit)
            assert not last or used + last > 80 or len(sessions) + 1 > limit
        elif deed == "drop":
            given_up(sessions.drop(A))
        elif deed == "clear":
            given_up(sessions.clear())
            assert not held
        assert len(sessions) == len(held)
