"""The records of the live sessions, without vLLM."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.context import Context
from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Query
from genlm.vllm.request import VllmRequest
from genlm.vllm.sessions import Sessions

A = Adapter("a", "/a", 1)
BLOCK = 4
CAPACITY = 30


def footprint(length: int) -> int:
    return (length // BLOCK + 1) * BLOCK


def session(*ids: int, adapter: Adapter | None = None, request_id: str = "") -> VllmRequest:
    query = Query(ids, adapter)
    return VllmRequest(query, query, request_id, footprint(len(ids)))


def test_pinning_leaves_places_for_other_requests():
    sessions = Sessions(limit=1, capacity=1000, footprint=footprint, longest=40, reach=BLOCK)
    sessions.pin(session(1))
    with pytest.raises(EngineError, match=r"1 prefixes are pinned.*clear_kv_cache.*max_num_seqs"):
        sessions.check_room_for_pin(Query((2,)))


contexts = st.lists(st.integers(0, 1), min_size=1, max_size=8).map(tuple)
deeds = st.lists(
    st.tuples(
        st.sampled_from(["park"] * 5 + ["take"] * 5 + ["trim", "pin", "drop", "clear"]),
        contexts,
        st.sampled_from([None, A]),
    ),
    min_size=30,
    max_size=60,
)


@given(deeds, st.integers(0, 5))
def test_every_session_is_either_held_or_given_up_once(deeds, limit):
    """Against a plain dict by request id: none is lost, none given up twice, a trim gives up the
    least recently used beyond the limits, and no more, and the longest one within reach is
    taken."""
    sessions = Sessions(
        limit=limit, capacity=CAPACITY, footprint=footprint, longest=40, reach=BLOCK
    )
    held, pinned = {}, set()

    def given_up(released):
        ids = [one.request_id for one in released]
        assert len(set(ids)) == len(ids)
        return [held.pop(each) for each in ids]

    def idle():
        return [each for each in held.values() if each.request_id not in pinned]

    def within_reach(query):
        return [
            each.prompt.length
            for each in idle()
            if 0 < query.length - each.prompt.length <= BLOCK
            and each.prompt == Query(query.context.first(each.prompt.length), query.adapter)
        ]

    for number, (deed, ids, adapter) in enumerate(deeds):
        new = session(*ids, adapter=adapter, request_id=f"r{number}")
        if deed == "park":
            given_up(sessions.park(new))
            held[new.request_id] = new
        elif deed == "pin" and not sessions.is_pinned(new.prompt):
            sessions.pin(new)
            held[new.request_id] = new
            pinned.add(new.request_id)
        elif deed == "take":
            # As a context that knows its parent, and as one that does not.
            query = Query(Context(ids[:1], 3).followed_by(ids[1:]), adapter)
            lengths = within_reach(query)
            taken = sessions.take(query if number % 2 else new.prompt)
            assert (taken.prompt.length if taken else 0) == max(lengths, default=0)
            if taken:
                assert taken.prompt == Query(ids[: taken.prompt.length], adapter)
                given_up([taken])
        elif deed == "trim":
            before = idle()
            gone = given_up(sessions.trim(len(ids)))
            assert gone == before[: len(gone)]
            used = sum(each.tokens for each in held.values()) + len(ids)
            last = gone[-1].tokens if gone else 0
            assert not idle() or (used <= CAPACITY and len(held) <= limit)
            assert not last or used + last > CAPACITY or len(held) + 1 > limit
        elif deed == "drop":
            with_adapter = {each.request_id for each in held.values() if each.prompt.adapter == A}
            assert {each.request_id for each in given_up(sessions.drop(A))} == with_adapter
        elif deed == "clear":
            given_up(sessions.clear())
            assert not held
        assert len(sessions) == len(held)
        pins = [each.tokens for each in held.values() if each.request_id in pinned]
        assert sessions.pinned_tokens == sum(pins)
