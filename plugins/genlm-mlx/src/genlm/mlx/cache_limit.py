"""The cache limit: how much is kept besides a batch."""

from __future__ import annotations

#: Without a limit, the state in all may take this many times what the largest batch took, so that
#: two groups of contexts can take turns, even if one has longer contexts.
KEPT_PER_LARGEST_BATCH = 5 / 2

#: Without a limit, at least this many bytes may be kept besides any batch.
MIN_KEPT_BYTES = 64 << 20


class CacheLimit:
    """The most bytes to keep besides a batch.

    The largest batch counts, not the current one: a single request between the steps of a program
    must not cost the program its state.

    Args:
        max_bytes: The limit; ``None`` keeps two and a half times what the largest batch has taken
            since everything was dropped, with the current batch, and at least 64 MiB besides it.
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
