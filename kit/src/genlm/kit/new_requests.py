"""Requests with a common prefix: one begins, and the others wait for its state.

For engines that reuse the state computed in earlier steps, but not all of the state computed in the
same step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from genlm.kit.prefixes import PrefixIndex, length_of, tokens_in

T = TypeVar("T")

#: The fewest tokens that a request must save to wait for another one.
MIN_TOKENS_TO_WAIT = 2


def tokens_per_forward(device_type: str) -> int:
    """How many tokens take as long as one more forward.

    Args:
        device_type: The type of the device, as PyTorch names it: ``"cpu"``, ``"cuda"``, ...
    """
    return 40 if device_type == "cpu" else 1024


class Leaders(Generic[T]):
    """Decides, before each step of an engine, which new requests wait for others.

    No request waits for ever, if the engine begins the requests that do not wait in the order
    asked, as far as it has room. A request that has waited waits again in only two cases: more of
    its tokens are known now; or it waits for the same request as before, which has begun or was
    asked earlier.

    Args:
        least_saved: Requests wait only if this saves at least so many tokens in all.
        each: A request waits only if another one computes at least so many of its tokens.
    """

    def __init__(self, least_saved: int, each: int = MIN_TOKENS_TO_WAIT) -> None:
        self._least_saved, self._each = least_saved, each
        # For each request, which one it has waited for, and how many of its tokens were known then.
        self._waited: dict[T, tuple[T, int]] = {}

    def waiting(
        self, begun: Mapping[T, bytes], new: Mapping[T, bytes], known: Callable[[T, int], int]
    ) -> set[T]:
        """The new requests that should wait now.

        Args:
            begun: The requests that the engine computes, and their keys
                (:func:`~genlm.kit.prefixes.key_of`).
            new: The requests that the engine has not begun, in the order asked, and their keys.
            known: A function of a request and of the number of leading tokens that it shares with
                another one. It returns how many of these tokens the engine would find computed if
                the request began now.
        """
        index: PrefixIndex[bytes, T] = PrefixIndex()
        for one, key in begun.items():
            index.add(key, one)
        places = {one: at for at, one in enumerate(new)}
        wait: dict[T, tuple[T, int]] = {}
        saved = 0
        # The longest request leads, because others may be inside it.
        for one in sorted(new, key=lambda one: -len(new[one])):
            nearest, common = index.nearest(new[one])
            # The last token must be computed to give the row.
            shared = min(tokens_in(common), length_of(new[one]) - 1)
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
