"""The prefix index: which kept row shares the longest prefix with a context."""

from __future__ import annotations

from bisect import bisect_left, insort

from attrs import define, field

from genlm.hf.job import HEADER, WIDTH, key_of_prefix, shared_tokens


@define(eq=False)
class Row:
    """Key/value state of one token sequence, which lies at one place of the pool.

    Attributes:
        slot: Its place in the pool.
        key: The sequence, see :class:`~genlm.hf.job.Job`; the state of every prefix of it is there
            too.
        used: When it was last used, in ticks of the store.
        pinned: Whether it stays until the state is cleared, and is never extended in place.
    """

    slot: int
    key: bytes
    used: int = 0
    pinned: bool = False

    @property
    def length(self) -> int:
        """The number of tokens."""
        return (len(self.key) - HEADER) // WIDTH


@define(eq=False)
class PrefixIndex:
    """Rows by key.

    Keys are kept in a sorted list: whichever of them shares the longest prefix with a context is a
    neighbour of the place where the context itself would stand. Two bisections on bytes replace a
    tree.
    """

    _rows: dict[bytes, Row] = field(factory=dict)
    _keys: list[bytes] = field(factory=list)

    def rows(self) -> list[Row]:
        """All rows."""
        return list(self._rows.values())

    def get(self, key: bytes) -> Row | None:
        """The row of exactly this key."""
        return self._rows.get(key)

    def add(self, row: Row) -> None:
        """Put in a row whose key no other row has."""
        self._rows[row.key] = row
        insort(self._keys, row.key)

    def remove(self, row: Row) -> None:
        """Take out a row."""
        del self._rows[row.key]
        del self._keys[bisect_left(self._keys, row.key)]

    def longest(self, key: bytes) -> tuple[Row | None, int]:
        """The row that shares the most leading tokens with ``key``, and how many.

        Among equals the row that ends there is preferred: it can be continued in place.
        """
        at = bisect_left(self._keys, key)
        best, shared = None, 0
        for neighbour in self._keys[max(at - 1, 0) : at + 1]:
            common = shared_tokens(neighbour, key)
            if common > shared:
                best, shared = self._rows[neighbour], common
        return (
            (self._rows.get(key_of_prefix(key, shared), best), shared)
            if best is not None
            else (None, 0)
        )
