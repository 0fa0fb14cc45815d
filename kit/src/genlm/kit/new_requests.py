"""Requests that wait before an engine begins them: of those that begin alike, one goes first.

For engines that find what was computed before a step, and not all that the same step computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from genlm.kit.prefixes import PrefixIndex, length_of, tokens_in

T = TypeVar("T")

#: The fewest tokens for which a request waits.
MIN_TOKENS_TO_WAIT = 2


def tokens_per_forward(device_type: str) -> int:
    """So many tokens take as long as a forward more."""
    return 40 if device_type == "cpu" else 1024


class Leaders(Generic[T]):
    """Decides, before each step of an engine, which new requests wait for others.

    Nobody waits for ever, if those that do not wait begin in the order asked, as far as there is
    room: who has waited waits again only if more of its tokens are known, or for the same one, if
    that has begun or was asked before.

    Args:
        least_saved: Requests wait if this saves so many tokens in all.
        each: And only those that have so many of their own computed by others.
    """

    def __init__(self, least_saved: int, each: int = MIN_TOKENS_TO_WAIT) -> None:
        self._least_saved, self._each = least_saved, each
        # For which each has waited, and how many of its tokens were known.
        self._waited: dict[T, tuple[T, int]] = {}

    def waiting(
        self, begun: Mapping[T, bytes], new: Mapping[T, bytes], known: Callable[[T, int], int]
    ) -> set[T]:
        """Those of the new requests that wait now.

        Args:
            begun: The requests that the engine computes, and their keys
                (:func:`~genlm.kit.prefixes.key_of`).
            new: Those that it has not begun, in the order asked.
            known: How many first tokens of a request the engine will find if it begins now, of so
                many that another request shares.
        """
        index: PrefixIndex[bytes, T] = PrefixIndex()
        for one, key in begun.items():
            index.add(key, one)
        places = {one: at for at, one in enumerate(new)}
        wait: dict[T, tuple[T, int]] = {}
        saved = 0
        # The longest leads: it may have others in it.
        for one in sorted(new, key=lambda one: -len(new[one])):
            nearest, common = index.nearest(new[one])
            shared = min(tokens_in(common), length_of(new[one]) - 1)  # the last gives the row
            if nearest is not None and shared >= self._each:
                leader, there = index[nearest], known(one, shared)
                first = leader in begun or places[leader] < places[one]
                if shared - there >= self._each and self._may_wait(one, leader, there, first):
                    wait[one] = leader, there
                    saved += shared - there
                    continue
            index.add(new[one], one)
        if saved < self._least_saved:
            wait = {}
        self._waited = {one: self._waited[one] for one in new if one in self._waited} | wait
        return set(wait)

    def _may_wait(self, one: T, leader: T, known: int, first: bool) -> bool:
        """Whether it waits for this one, which begins first even if it does not wait."""
        before, was_known = self._waited.get(one, (None, -1))
        return known > was_known or (first and leader is before)
