"""The placement of contexts on replicas."""

from __future__ import annotations

import pytest

from genlm.core import Adapter, Query
from genlm.core.context import Context
from genlm.ray.affinity import Affinity, prefixes

FREE = {"left": 0, "right": 0}


def query(*token_ids: int, adapter: Adapter | None = None) -> Query:
    return Query(token_ids, adapter)


def choose(affinity: Affinity[str], loads: dict[str, int], *queries: Query) -> str:
    """The member that the first query goes to."""
    first, *_ = affinity.choose(queries, loads.copy())
    return first


def test_a_context_follows_the_longest_prefix_that_is_known() -> None:
    affinity: Affinity[str] = Affinity()
    prompt = tuple(range(100))
    home = choose(affinity, FREE, query(*prompt))
    other = next(member for member in FREE if member != home)
    grown = prompt
    for token_id in range(200):
        grown = (*grown, token_id % 7)
        assert choose(affinity, {home: 3, other: 0}, query(*grown)) == home
    assert choose(affinity, {home: 3, other: 0}, query(*prompt[:64], 5, 5, 5)) == home


def test_grown_context_goes_to_the_replica_of_its_parent() -> None:
    affinity: Affinity[str] = Affinity()
    grown = Context((1, 2, 3), 300)
    home = choose(affinity, FREE, Query(grown))
    other = next(member for member in FREE if member != home)
    for at in range(40):
        grown = grown.extend(*range(at, at + 1 + at % 40))
        assert choose(affinity, {home: 3, other: 0}, Query(grown)) == home
    ids = grown.token_ids
    for end in range(32, len(ids), 32):
        assert choose(affinity, {home: 3, other: 0}, query(*ids[:end], 299, 299)) == home
    assert choose(affinity, {home: 3, other: 0}, query(*ids[:31], 299, 299)) == other


def test_unknown_context_goes_to_the_least_loaded_member() -> None:
    affinity: Affinity[str] = Affinity()
    choose(affinity, {"left": 0, "right": 9}, query(1, 2, 3))
    assert choose(affinity, {"left": 5, "right": 2}, query(9, 9, 9)) == "right"


def test_an_overloaded_member_is_relieved() -> None:
    affinity: Affinity[str] = Affinity()
    assert choose(affinity, {"left": 0, "right": 1}, query(1, 2, 3)) == "left"
    assert choose(affinity, {"left": 40, "right": 1}, query(1, 2, 3, 4)) == "right"
    assert choose(affinity, {"left": 1, "right": 2}, query(1, 2, 3, 4, 5)) == "right"
    assert choose(affinity, {"left": 0}, query(1, 2, 3, 4, 5)) == "left", "the other one is gone"


def test_contexts_placed_together_are_shared_among_members() -> None:
    affinity: Affinity[str] = Affinity()
    choose(affinity, {"left": 0, "right": 1}, query(1, 2, 3))
    assert choose(affinity, {"left": 9, "right": 0}, query(1, 2, 3, 4), *[query(9)] * 6) == "left"
    assert choose(affinity, {"left": 10, "right": 0}, query(1, 2, 3, 5), *[query(9)] * 5) == "right"


def test_lost_state_attracts_no_context() -> None:
    affinity: Affinity[str] = Affinity()
    assert choose(affinity, {"left": 0, "right": 1}, query(1, 2, 3)) == "left"
    affinity.forget_member("left")
    assert choose(affinity, {"left": 1, "right": 0}, query(1, 2, 3, 4)) == "right"
    affinity.forget()
    assert choose(affinity, {"left": 0, "right": 1}, query(1, 2, 3, 4)) == "left"


def test_an_adapter_has_prefixes_of_its_own() -> None:
    affinity: Affinity[str] = Affinity()
    adapter = Adapter("a", "path", 1)
    assert choose(affinity, {"left": 0, "right": 1}, query(1, 2, 3)) == "left"
    assert choose(affinity, {"left": 1, "right": 0}, query(1, 2, 3, adapter=adapter)) == "right"
    grown = Context((1, 2, 3), 300).extend(4)
    assert choose(affinity, {"left": 1, "right": 0}, Query(grown)) == "left"
    assert choose(affinity, {"left": 0, "right": 1}, Query(grown, adapter)) == "right"


def test_extensions_of_the_empty_context_follow_no_replica() -> None:
    affinity: Affinity[str] = Affinity()
    nothing = Context((1,), 300).first(0)
    assert choose(affinity, {"left": 0, "right": 1}, Query(nothing.extend(5))) == "left"
    assert choose(affinity, {"left": 1, "right": 0}, Query(nothing.extend(6))) == "right"


def test_a_token_more_adds_at_most_two_prefixes_at_any_length() -> None:
    """A long context with a known parent costs as much as a short one."""
    for length in (100, 10_000):
        ids = tuple(range(length))
        parent, child = set(prefixes(query(*ids))), list(prefixes(query(*ids, 7)))
        assert next(i for i, prefix in enumerate(child) if prefix in parent) <= 1


def test_least_recently_used_prefixes_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("genlm.ray.affinity.MAX_PREFIXES", 3)
    affinity: Affinity[str] = Affinity()
    assert choose(affinity, {"left": 1, "right": 0}, query(0)) == "right"
    for token_id in range(1, 10):
        assert choose(affinity, FREE, query(token_id)) == "left"
        assert choose(affinity, FREE, query(0)) == "right"
    assert choose(affinity, {"left": 1, "right": 0}, query(1)) == "right"
