"""The prefix index: what it finds, how few keys it compares, and the order of use."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genlm.kit.prefixes import PrefixIndex, common_length

pytestmark = pytest.mark.any_version

TUPLES = st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple)
KEYS = st.one_of(st.just(tuple), st.just(bytes))


class Watched(tuple[int, ...]):
    """A key that records comparisons."""

    seen: ClassVar[set[int]] = set()

    def __lt__(self, other: Any) -> bool:
        self.seen.add(id(self))
        return super().__lt__(other)

    def __gt__(self, other: Any) -> bool:
        self.seen.add(id(self))
        return super().__gt__(other)

    def __getitem__(self, at: Any) -> Any:
        self.seen.add(id(self))
        return super().__getitem__(at)


@given(TUPLES, TUPLES, KEYS)
def test_common_length_matches_brute_force(a: Any, b: Any, kind: type) -> None:
    a, b = kind(a), kind(b)
    length = common_length(a, b)
    assert a[:length] == b[:length]
    assert a[: length + 1] != b[: length + 1] or length == min(len(a), len(b))


@given(st.sets(TUPLES), TUPLES, KEYS)
def test_lookups_match_a_scan(given: set[Any], key: Any, kind: type) -> None:
    stored, key = {kind(each) for each in given}, kind(key)
    index: PrefixIndex[Any, None] = PrefixIndex()
    for each in stored:
        index.add(each, None)
    prefixes = [each for each in stored if key[: len(each)] == each]
    assert index.longest_prefix(key) == max(prefixes, key=len, default=None)
    nearest, shared = index.nearest(key)
    assert shared == max((common_length(each, key) for each in stored), default=0)
    assert (nearest is None) == (shared == 0)
    assert nearest is None or common_length(nearest, key) == shared


def test_lookups_do_not_scan() -> None:
    rng = random.Random(0)
    index: PrefixIndex[tuple[int, ...], int] = PrefixIndex()
    prompt = tuple(rng.randrange(1000) for _ in range(50))
    stored = [Watched((*prompt, *(rng.randrange(4) for _ in range(20)))) for _ in range(4000)]
    for at, key in enumerate([*stored, prompt]):
        index.add(key, at)
    Watched.seen.clear()
    asked = (*stored[17], 1, 2, 3)
    assert index[index.longest_prefix(asked) or ()] == 17
    assert index.nearest(asked) == (stored[17], 70)
    assert index.longest_prefix((*prompt, 5)) == prompt
    assert 0 < len(Watched.seen) < 60, "a few for each halving of 4001 keys"


@given(st.lists(st.tuples(st.sampled_from(["add", "touch", "remove"]), TUPLES)))
def test_the_order_of_use(steps: list[tuple[str, tuple[int, ...]]]) -> None:
    index: PrefixIndex[tuple[int, ...], int] = PrefixIndex()
    used: dict[tuple[int, ...], int] = {}
    for at, (step, key) in enumerate(steps):
        if step != "add" and key not in used:
            with pytest.raises(KeyError):
                getattr(index, step)(key)
            continue
        value = used.pop(key, at)
        if step == "remove":
            assert index.remove(key) == value
            assert index.get(key) is None
            assert index.longest_prefix(key) != key
        elif step == "touch":
            index.touch(key)
            used[key] = value
        else:  # perhaps a second time
            index.add(key, at)
            used[key] = at
    assert list(index) == sorted(used)
    assert list(index.values()) == list(used.values())
    index.clear()
    assert (len(index), list(index), list(index.values())) == (0, [], [])
