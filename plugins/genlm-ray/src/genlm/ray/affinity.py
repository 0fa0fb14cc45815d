"""Prefix affinity: which replica has seen most of a context, and so keeps its key/value state."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Mapping
from typing import Generic, TypeVar

from genlm.core import Query

M = TypeVar("M", bound=Hashable)

#: Prefixes are remembered at multiples of this many tokens, and where a context ends.
BLOCK = 32

#: The most prefixes remembered, some three hundred bytes each.
KEPT = 100_000

#: A replica is overloaded if it has more than SLACK requests, and EXCESS times its share.
SLACK = 4
EXCESS = 1.25


class Affinity(Generic[M]):
    """Remembers which member was given which prefix. For one thread.

    A prefix is known by its length, its first block and its last one. So a context that grew by one
    token costs the same at any length. Two prefixes that differ in the middle alone are taken for
    one: that may cost time, and never changes a row.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, M] = OrderedDict()

    def choose(self, query: Query, loads: Mapping[M, int], together: int = 1) -> M:
        """The member to ask: the one that knows the longest prefix, unless it is overloaded; else
        the one with least to do. It knows this context from now on.

        Args:
            query: The context.
            loads: For each member that may be chosen, how many requests it has. At least one.
            together: How many requests are still to be placed, this one included. Each member has
                its share of them too, so that what stays where it is does not depend on the order.
        """
        unknown: list[Hashable] = []
        known: M | None = None
        for prefix in prefixes(query):
            known = self._known.get(prefix)
            if known is not None and known in loads:
                self._known.move_to_end(prefix)
                break
            known = None
            unknown.append(prefix)
        member = self._relieved(known, loads, together)
        for prefix in unknown:
            self._known[prefix] = member
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return member

    def _relieved(self, member: M | None, loads: Mapping[M, int], together: int) -> M:
        """The member, unless there is none or it is overloaded; else the one with least to do."""
        overload = max(SLACK, EXCESS * (sum(loads.values()) + together) / len(loads))
        if member is not None and loads[member] < overload:
            return member
        return min(loads, key=loads.__getitem__)

    def forget(self) -> None:
        """Nobody knows anything: the key/value state has been cleared."""
        self._known.clear()

    def forget_member(self, member: M) -> None:
        """The member has lost its state."""
        for prefix in [prefix for prefix, knows in self._known.items() if knows is member]:
            del self._known[prefix]


def prefixes(query: Query) -> Iterator[Hashable]:
    """The prefixes of a context at which it may be known, the longest first."""
    ids = query.token_ids
    version = 0 if query.adapter is None else query.adapter.version
    first, length = ids[:BLOCK], len(ids)
    ends = [length, length - 1] if length > 1 else [length]
    for end in (*ends, *range((length - 2) // BLOCK * BLOCK, 0, -BLOCK)):
        yield version, end, first[:end], ids[max(end - BLOCK, 0) : end]
