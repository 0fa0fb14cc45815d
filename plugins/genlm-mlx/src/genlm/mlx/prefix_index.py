"""Finding, among many token sequences, the one that a new sequence can start from."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from typing import Generic, TypeVar

Key = tuple[int, ...]
T = TypeVar("T")


def common_length(a: Key, b: Key) -> int:
    """How many leading elements ``a`` and ``b`` have in common."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    # a[:low] == b[:low] and a[:high] != b[:high]; slices compare at the speed of C.
    while high - low > 1:
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


class PrefixIndex(Generic[T]):
    """Values by key, in the keys' order.

    In sorted order whatever shares the longest prefix with a key stands next to it, so a lookup
    compares with ``O(log n)`` keys and never scans them.
    """

    def __init__(self) -> None:
        self._sorted: list[Key] = []
        self._values: dict[Key, T] = {}

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[Key]:
        return iter(self._sorted)

    def __contains__(self, key: Key) -> bool:
        return key in self._values

    def __getitem__(self, key: Key) -> T:
        return self._values[key]

    def add(self, key: Key, value: T) -> None:
        """Store ``value`` under ``key``, in place of what was there."""
        if key not in self._values:
            insort(self._sorted, key)
        self._values[key] = value

    def remove(self, key: Key) -> None:
        """Remove ``key``, which must be there."""
        del self._values[key]
        del self._sorted[bisect_left(self._sorted, key)]

    def longest_prefix(self, key: Key) -> Key | None:
        """The longest stored key with which ``key`` begins."""
        while key:
            at = bisect_right(self._sorted, key)
            if at == 0:
                return None
            before = self._sorted[at - 1]
            common = common_length(before, key)
            if common == len(before):
                return before
            # A stored prefix of `key` is one of this too: else it would stand between the two.
            key = key[:common]
        return None

    def nearest(self, key: Key) -> tuple[Key | None, int]:
        """A stored key that shares the longest prefix with ``key``, and that prefix's length."""
        at = bisect_left(self._sorted, key)
        best: tuple[Key | None, int] = (None, 0)
        for other in self._sorted[max(at - 1, 0) : at + 1]:
            common = common_length(other, key)
            if common > best[1]:
                best = (other, common)
        return best
