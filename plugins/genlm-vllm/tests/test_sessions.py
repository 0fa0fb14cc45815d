"""The records of the live sessions, without vLLM."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.core.context import Context
from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Query
from genlm.vllm.cache_usage import CacheUsage
from genlm.vllm.request import VllmRequest
from genlm.vllm.sessions import Sessions

A = Adapter("a", "/a", 1)
BLOCK = 4
CAPACITY = 30


def footprint(length: int) -> int:
    return (length // BLOCK + 1) * BLOCK


def session(
    *ids: int, adapter: Adapter | None = None, request_id: str = "", shareable: int | None = None
) -> VllmRequest:
    query, most = Query(ids, adapter), len(ids) - 1
    size = footprint(len(ids))
    shared = most if shareable is None else shareable
    return VllmRequest(query, query, size, shared, request_id=request_id)


def made(limit: int, capacity: int = CAPACITY, places: int = 0) -> Sessions:
    sizes = {"capacity": capacity, "shared": BLOCK, "longest": 40, "reach": BLOCK}
    return Sessions(limit=limit, places=places, footprint=footprint, forks=True, **sizes)


class Blocks:
    """vLLM's full blocks, each known by its contents and those of the blocks before it."""

    def __init__(self) -> None:
        self._of: dict[str, list[object]] = {}
        self._known: dict[object, object] = {}  # blocks by contents, as long as a request has them

    def begin(self, new: VllmRequest, others: Iterable[VllmRequest]) -> None:
        there = {block for each in others for block in self._of[each.request_id]}
        self._known = {key: block for key, block in self._known.items() if block in there}
        ids, mine = new.prompt.token_ids, []
        for end in range(BLOCK, len(ids) + 1, BLOCK):
            contents = new.prompt.adapter, ids[:end]
            shared = self._known.get(contents) if end <= new.shareable else None
            mine.append(shared or object())
            self._known.setdefault(contents, mine[-1])
        self._of[new.request_id] = mine

    def taken_by(self, requests: Iterable[VllmRequest]) -> int:
        """The tokens that they take together."""
        own = [(each, self._of[each.request_id]) for each in requests]
        blocks = {block for _, full in own for block in full}
        return BLOCK * len(blocks) + sum(one.tokens - BLOCK * len(full) for one, full in own)


def test_pinning_leaves_places_for_other_requests():
    sessions = made(limit=1, capacity=1000)
    sessions.pin(session(1))
    with pytest.raises(EngineError, match=r"1 prefixes are pinned.*clear_kv_cache.*max_num_seqs"):
        sessions.check_room_for_pin(session(2))


def test_shorter_session_is_left_for_a_fork_of_the_one_just_taken():
    sessions = made(3)
    for ids in ((1,), (1, 2), (1, 5)):
        new = session(*ids, request_id=str(ids))
        sessions.usage.add(new)
        sessions.usage.complete(new)
        assert sessions.park(new) is None
    assert sessions.take(Query((1, 2, 3))).prompt == Query((1, 2))
    # (1,) is kept, but it would need one more token.
    assert sessions.take(Query((1, 2, 3, 4))) is None
    assert sessions.take(Query((1, 5, 6))).prompt == Query((1, 5))
    sessions.settle()
    assert sessions.take(Query((1, 2, 3, 4))).prompt == Query((1,))


def test_a_taken_session_that_is_given_up_leaves_nothing():
    sessions = made(3)
    for ids in ((1,), (1, 2)):
        new = session(*ids, request_id=str(ids))
        sessions.usage.add(new)
        sessions.park(new)
    for longest in ((1, 2), (1,)):  # of a session that is no longer there, nothing is forked
        taken = sessions.take(Query((1, 2, 3)))
        assert sessions.give_up_taken(taken).prompt == Query(longest)
    assert sessions.take(Query((1, 2, 3))) is None
    assert (len(sessions), sessions.usage.tokens) == (0, 0)


def test_shared_tokens_of_pins_count_once():
    sessions = made(limit=10, capacity=44 + 24)
    for last in range(4):
        pin = session(*range(8), last, request_id=str(last))
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
    there, pinned = {}, set()
    blocks, pins = Blocks(), Blocks()

    def begin(new):
        sessions.usage.add(new)
        sessions.usage.complete(new)
        blocks.begin(new, there.values())

    def given_up(released):
        ids = [one.request_id for one in released]
        assert len(set(ids)) == len(ids)
        return [there.pop(each) for each in ids]

    def idle():
        return [each for each in there.values() if each.request_id not in pinned]

    def within_reach(query):
        return [
            each.prompt.length
            for each in idle()
            if 0 < query.length - each.prompt.length <= BLOCK
            and each.prompt == Query(query.context.first(each.prompt.length), query.adapter)
        ]

    for number, (deed, ids, adapter) in enumerate(deeds):
        shareable = len(ids) // 2 if number % 3 else None
        new = session(*ids, adapter=adapter, request_id=f"r{number}", shareable=shareable)
        if deed == "park":
            begin(new)
            given_up([*filter(None, [sessions.park(new)])])
            there[new.request_id] = new
        elif deed == "pin" and not sessions.is_pinned(new.prompt):
            begin(new)
            sessions.pin(new)
            pins.begin(new, [there[each] for each in pinned])
            there[new.request_id] = new
            pinned.add(new.request_id)
        elif deed == "take":
            # Once as a context that knows its parent, and once as one that does not.
            query = Query(Context(ids[:1], 3).followed_by(ids[1:]), adapter)
            lengths = within_reach(query)
            taken = sessions.take(query if number % 2 else new.prompt)
            assert (taken.prompt.length if taken else 0) == max(lengths, default=0)
            if taken:
                assert taken.prompt == Query(ids[: taken.prompt.length], adapter)
                sessions.settle()
                sessions.usage.remove(taken)
                given_up([taken])
        elif deed == "trim":
            before = idle()
            begin(new)  # in flight
            gone = given_up(sessions.trim(len(ids)))
            most = max(limit, places - len(ids))
            assert gone == before[: len(gone)]
            rest = [*there.values(), new]
            assert not idle() or (blocks.taken_by(rest) <= CAPACITY and len(there) <= most)
            full = len(there) + 1 > most
            assert not gone or blocks.taken_by([*rest, gone[-1]]) > CAPACITY or full
            sessions.usage.remove(new)
        elif deed == "drop":
            with_adapter = {each.request_id for each in there.values() if each.prompt.adapter == A}
            assert {each.request_id for each in given_up(sessions.drop(A))} == with_adapter
        elif deed == "clear":
            given_up(sessions.clear())
            assert not there
        assert len(sessions) == len(there)
        assert sessions.usage.tokens == blocks.taken_by(there.values())
        pinned &= there.keys()
        assert sessions.pinned_tokens == pins.taken_by(map(there.get, pinned))


def test_block_that_a_request_fills_itself_is_not_shared():
    """vLLM looks up shared blocks when a request begins, and always computes its last token."""
    usage = CacheUsage(BLOCK)
    first, same = session(*range(8), request_id="a"), session(*range(8), request_id="b")
    usage.add(first)
    usage.complete(first)
    usage.add(same)
    # The second block is not shared, because the last token fills it.
    assert usage.tokens == 12 + 12 - 4
    short, long = session(*range(7), request_id="c"), session(*range(9), request_id="c")
    usage.add(short)
    usage.extend(short, long)
    assert usage.tokens == 20 + 12 - 4
    later = session(*range(9), 7, request_id="d")
    usage.add(later)
    assert usage.tokens == 28 + 12 - 8
    for each in (first, long, same):
        usage.remove(each)
    assert usage.tokens == later.tokens
    usage.remove(later)
    assert usage.tokens == 0


def test_block_filled_by_a_last_token_is_shared_once_computed():
    """Until then, vLLM may begin the longer request first."""
    usage = CacheUsage(BLOCK)
    first, longer = session(*range(8), request_id="a"), session(*range(9), request_id="b")
    usage.add(first)
    usage.add(longer)
    assert usage.tokens == 12 + 12 - 4
    usage.remove(longer)
    usage.complete(first)
    usage.add(longer)
    assert usage.tokens == 12 + 12 - 8
