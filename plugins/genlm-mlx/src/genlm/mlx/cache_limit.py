"""The cache limit: how much is kept besides a batch."""

from __future__ import annotations

#: Without a limit, all state together may take this many times the memory of the largest batch.
#: Then two groups of contexts can take turns, even if one group has longer contexts.
KEPT_PER_LARGEST_BATCH = 5 / 2

#: Without a limit, at least this many bytes may be kept besides any batch.
MIN_KEPT_BYTES = 64 << 20


class CacheLimit:
    """The most bytes to keep besides a batch.

    The limit depends on the largest batch and not on the current one, so that a single request
    between the steps of a program does not evict the program's state.

    Args:
        max_bytes: The limit. With ``None``, all state together may take two and a half times what
            the largest batch took since everything was last dropped, and at least 64 MiB are kept
            besides the current batch.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._largest = 0

    def limit(self, in_hand: int) -> int:
        """The limit besides a batch that takes ``in_hand`` bytes."""
        if self._max_bytes is not None:
            return self._max_bytes
        self._largest = max(self._largest, in_hand)
        return max(MIN_KEPT_BYTES, int(KEPT_PER_LARGEST_BATCH * self._largest) - in_hand)

    def clear(self) -> None:
        """Note that everything was dropped."""
        self._largest = 0
