"""Prefix affinity: which replica has seen most of a context, and so keeps its KV cache."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from genlm.core import Query
from genlm.core.context import Context

M = TypeVar("M", bound=Hashable)

#: Prefixes are remembered at multiples of this many tokens, and at the ends of a context and of its
#: parent.
BLOCK_TOKENS = 32

#: The most prefixes that are remembered; each takes about 130 bytes.
MAX_PREFIXES = 100_000

#: A replica is overloaded if it has more than this many requests, and more than this many times its
#: share.
MIN_OVERLOAD_REQUESTS, OVERLOAD_RATIO = 4, 1.25


class Affinity(Generic[M]):
    """Remembers which member was given which prefix. Used by one thread only.

    A context is identified by its hash, and its parent by the hash that the context keeps of it.
    Every other prefix is identified by a hash of its length, its first block and its last block. So
    looking up a context that grew costs the same at any length. Prefixes that differ only in the
    middle count as one, which may cost time but never changes a row.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, M] = OrderedDict()

    def choose(self, queries: Sequence[Query], loads: dict[M, int]) -> Iterator[M]:
        """The member to ask for each context: the one that knows the longest prefix or, if that is
        overloaded, the one with the fewest requests. From then on, it counts as knowing this
        context.

        Args:
            queries: The contexts.
            loads: For each member that may be chosen, how many requests it has; at least one
                member. Each context placed here is added.
        """
        known = self._known
        # The share counts all requests, so that it does not depend on the order of placement.
        overload = max(
            MIN_OVERLOAD_REQUESTS,
            OVERLOAD_RATIO * (sum(loads.values()) + len(queries)) / len(loads),
        )
        for query in queries:
            unknown: list[int] = []
            load = overload
            for prefix in prefixes(query):
                member = known.get(prefix)
                if member is not None and member in loads:
                    known.move_to_end(prefix)
                    load = loads[member]
                    break
                unknown.append(prefix)
            if member is None or load >= overload:
                member = min(loads, key=loads.__getitem__)
            for prefix in unknown:
                known[prefix] = member
            while len(known) > MAX_PREFIXES:
                known.popitem(last=False)
            loads[member] += 1
            yield member

    def forget(self) -> None:
        """Forget all prefixes, because the KV cache was cleared."""
        self._known.clear()

    def forget_member(self, member: M) -> None:
        """Forget the prefixes of a member that has lost its state."""
        for prefix in [prefix for prefix, knows in self._known.items() if knows is member]:
            del self._known[prefix]


def prefixes(query: Query) -> Iterator[int]:
    """The prefixes of a context at which it may be known, the longest first."""
    context, length = query.context, query.context.length
    grown, version = context.grown, 0 if query.adapter is None else query.adapter.version
    yield hash((version, context.hash_value))
    if length % BLOCK_TOKENS < grown:  # the blocks that end after the parent
        yield from blocks(context, version, length - grown)
    if length > (grown or 1):
        parent = context.parent_hash if grown else context.hash_without_last()
        yield hash((version, parent))
    if length >= BLOCK_TOKENS:
        yield from blocks(context, version, 0)


def blocks(context: Context, version: int, above: int) -> Iterator[int]:
    """The prefixes of whole blocks that are longer than ``above``."""
    ids, first = context.token_ids, context[:BLOCK_TOKENS]
    last, first_end = (length // BLOCK_TOKENS * BLOCK_TOKENS for length in (len(ids), above))
    for end in range(last, first_end, -BLOCK_TOKENS):
        yield hash((version, end, first, ids[max(end - BLOCK_TOKENS, BLOCK_TOKENS) : end]))
