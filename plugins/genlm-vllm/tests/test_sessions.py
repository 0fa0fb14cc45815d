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


def made(limit: int, capacity: int = CAPACITY, places: int = 0) -> Sessions:
    sizes = {"capacity": capacity, "shared": BLOCK, "longest": 40, "reach": BLOCK}
    return Sessions(limit=limit, places=places, footprint=footprint, **sizes)


def taken_by(*requests: VllmRequest) -> int:
    """The tokens that they take together: each full block with all before it once."""
    ends = [(each, range(BLOCK, each.prompt.length + 1, BLOCK)) for each in requests]
    blocks = {(one.prompt.adapter, one.prompt.token_ids[:end]) for one, own in ends for end in own}
    own = sum(one.tokens - BLOCK * len(full) for one, full in ends)
    return BLOCK * len(blocks) + own


def test_pinning_leaves_places_for_other_requests():
    sessions = made(limit=1, capacity=1000)
    sessions.pin(session(1))
    with pytest.raises(EngineError, match=r"1 prefixes are pinned.*clear_kv_cache.*max_num_seqs"):
        sessions.check_room_for_pin(session(2))


def test_pins_count_what_they_share_once():
    sessions = made(limit=10, capacity=44 + 24)
    for last in range(4):
        pin = session(*range(8), last)
        sessions.check_room_for_pin(pin)
        sessions.pin(pin)
    with pytest.raises(EngineError, match=r"9 more tokens would hold 28 of the 68 tokens"):
        sessions.check_room_for_pin(session(*range(8), 5))


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


@given(deeds, st.integers(0, 5), st.integers(0, 8))
def test_every_session_is_either_held_or_given_up_once(deeds, limit, places):
    """Against a plain dict by request id: none is lost, none given up twice, a trim gives up the
    least recently used beyond the limits, and no more, and the longest one within reach is
    taken."""
    sessions = made(limit, places=places)
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
            sessions.held.add(new)
            given_up(sessions.park(new))
            held[new.request_id] = new
        elif deed == "pin" and not sessions.is_pinned(new.prompt):
            sessions.held.add(new)
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
                sessions.held.remove(taken)
                given_up([taken])
        elif deed == "trim":
            before = idle()
            sessions.held.add(new)  # in flight
            gone = given_up(sessions.trim(len(ids)))
            most = max(limit, places - len(ids))
            assert gone == before[: len(gone)]
            rest = [*held.values(), new]
            assert not idle() or (taken_by(*rest) <= CAPACITY and len(held) <= most)
            assert not gone or taken_by(*rest, gone[-1]) > CAPACITY or len(held) + 1 > most
            sessions.held.remove(new)
        elif deed == "drop":
            with_adapter = {each.request_id for each in held.values() if each.prompt.adapter == A}
            assert {each.request_id for each in given_up(sessions.drop(A))} == with_adapter
        elif deed == "clear":
            given_up(sessions.clear())
            assert not held
        assert len(sessions) == len(held)
        assert sessions.held.tokens == taken_by(*held.values())
        pins = [each for each in held.values() if each.request_id in pinned]
        assert sessions.pinned_tokens == taken_by(*pins)
