"""The prefix index: which known token sequence shares the longest prefix with a new one.

For engines that keep the KV cache by context, and start every new context from its longest known
prefix.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from typing import Generic, TypeVar

#: A sequence: a tuple of ids, or the same as bytes, which compare faster. It begins with the
#: adapter's version, which must not be mixed.
K = TypeVar("K", bytes, tuple[int, ...])
T = TypeVar("T")


def common_length(left: K, right: K) -> int:
    """How many leading elements two keys have in common: token ids of tuples, or bytes."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    # left[:low] == right[:low], left[:high] != right[:high]; slices compare at the speed of C.
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


#: The bytes of a token in a key, and of the adapter's version before the first token.
ID_BYTES = array("I").itemsize


def key_of(version: int, token_ids: Sequence[int]) -> bytes:
    """A context as bytes. It extends another context exactly if its key extends the other's key.

    Args:
        version: The adapter's version; 0 is the base model. Contexts of different versions share no
            state, so their keys have no prefix in common.
        token_ids: The context.

    Examples:
        >>> length_of(key_of(3, [5, 6]))
        2
        >>> shared_length(key_of(3, [5, 6]), key_of(3, [5, 7]))
        1
        >>> shared_length(key_of(3, [5, 6]), key_of(4, [5, 6]))
        0
    """
    return bytes_of((version,)) + bytes_of(token_ids)


def bytes_of(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of a key."""
    return array("I", token_ids).tobytes()


def length_of(key: bytes) -> int:
    """How many tokens a key has."""
    return len(key) // ID_BYTES - 1


def prefix_of(key: bytes, length: int) -> bytes:
    """The key of the first ``length`` tokens."""
    return key[: ID_BYTES * (length + 1)]


def shared_length(left: bytes, right: bytes) -> int:
    """How many leading tokens two keys share; 0 if their versions differ."""
    return tokens_in(common_length(left, right))


def tokens_in(shared: int) -> int:
    """How many whole tokens the first ``shared`` bytes of a key hold."""
    return max(shared // ID_BYTES - 1, 0)


def nearest_of(keys: Sequence[K], key: K) -> tuple[int, int]:
    """The index of the sorted key that shares the longest prefix with ``key``, and the length of
    that prefix; ``(0, 0)`` if no key shares anything. It is a neighbour of the place where ``key``
    would be inserted."""
    at = bisect_left(keys, key)
    best = longest = 0
    for neighbour in range(max(at - 1, 0), min(at + 1, len(keys))):
        if keys[neighbour][: longest + 1] == key[: longest + 1]:  # this neighbour shares more
            best, longest = neighbour, common_length(keys[neighbour], key)
    return best, longest


class PrefixIndex(Generic[K, T]):
    """Values by key, found by prefix, in the order in which they were last used.

    Keys are kept in a sorted list. The key that shares the longest prefix with a new key is a
    neighbour of the place where the new key would be inserted. So a lookup compares ``O(log n)``
    keys, and needs no tree.

    Examples:
        >>> index: PrefixIndex[tuple[int, ...], str] = PrefixIndex()
        >>> index.add((1, 2, 3), "a")
        >>> index.add((1, 5), "b")
        >>> index.nearest((1, 2, 4))
        ((1, 2, 3), 2)
        >>> index.longest_prefix((1, 5, 9))
        (1, 5)
        >>> index.touch((1, 2, 3))
        >>> list(index.values())
        ['b', 'a']
    """

    def __init__(self) -> None:
        self._sorted: list[K] = []
        self._values: dict[K, T] = {}  # ordered by use, the least recently used key first

    def __len__(self) -> int:
        return len(self._sorted)

    def __iter__(self) -> Iterator[K]:
        """The keys in their own order."""
        return iter(self._sorted)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __getitem__(self, key: K) -> T:
        return self._values[key]

    def get(self, key: K) -> T | None:
        """The value of exactly this key; ``None`` if there is none."""
        return self._values.get(key)

    def values(self) -> Iterator[T]:
        """The values, the least recently used first. Nothing may be added or removed meanwhile."""
        return iter(self._values.values())

    def add(self, key: K, value: T) -> None:
        """Store ``value`` under ``key`` as the most recently used. It replaces an earlier value."""
        if key in self._values:
            del self._values[key]
        else:
            insort(self._sorted, key)
        self._values[key] = value

    def remove(self, key: K) -> T:
        """Remove ``key`` and return its value.

        Raises:
            KeyError: the key is not there.
        """
        value = self._values.pop(key)
        del self._sorted[bisect_left(self._sorted, key)]
        return value

    def touch(self, key: K) -> None:
        """Make ``key`` the most recently used.

        Raises:
            KeyError: the key is not there.
        """
        self._values[key] = self._values.pop(key)

    def clear(self) -> None:
        """Remove everything."""
        self._sorted.clear()
        self._values.clear()

    def longest_prefix(self, key: K) -> K | None:
        """The longest stored key that is a prefix of ``key``; ``None`` if there is none."""
        if key in self._values:  # the usual case
            return key
        while key:
            at = bisect_right(self._sorted, key)
            if at == 0:
                return None
            before = self._sorted[at - 1]
            common = common_length(before, key)
            if common == len(before):
                return before
            # A stored prefix of ``key`` is also a prefix of the neighbour; otherwise it would lie
            # between the two.
            key = key[:common]
        return None

    def nearest(self, key: K) -> tuple[K | None, int]:
        """The stored key that shares the longest prefix with ``key``, and that prefix's length."""
        at, shared = nearest_of(self._sorted, key)
        return (self._sorted[at] if shared else None), shared
