"""Aside: how much is kept beside a batch."""

from __future__ import annotations

#: Where no limit is given: how much is kept in all, of what the largest batch took (two groups of
#: contexts can take turns, also when one has the longer contexts), and the least bytes to keep
#: beside any batch.
IN_ALL = 5 / 2
LEAST_ASIDE = 64 << 20


class Aside:
    """The most bytes to keep beside a batch.

    What the largest batch took counts, and not the batch in hand: a lone request between the steps
    of a program must not cost the program its state.

    Args:
        max_bytes: The limit; ``None`` keeps two and a half times what the largest batch has taken
            since everything was dropped, the batch in hand included, and 64 MiB at least beside it.
    """

    def __init__(self, max_bytes: int | None) -> None:
        self._max_bytes = max_bytes
        self._largest = 0

    def limit(self, in_hand: int) -> int:
        """The limit beside a batch that takes ``in_hand`` bytes."""
        if self._max_bytes is not None:
            return self._max_bytes
        self._largest = max(self._largest, in_hand)
        return max(LEAST_ASIDE, int(IN_ALL * self._largest) - in_hand)

    def clear(self) -> None:
        """Everything was dropped."""
        self._largest = 0
