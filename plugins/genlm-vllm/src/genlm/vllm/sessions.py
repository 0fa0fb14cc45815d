"""Live sessions: contexts whose key/value state vLLM keeps, so that extending one costs only the
new tokens.

These are only records; the engine tells vLLM. A session is an unfinished streaming request. It
keeps its blocks and one of the scheduler's ``max_num_seqs`` places. So the number of idle sessions
is limited, and they are dropped when the key/value cache is full: as long as idle sessions and the
contexts in flight fit in the cache together, vLLM can always continue.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from attrs import field, frozen

from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Query
from genlm.vllm.internals import TokenIds


@frozen
class Session:
    """A context that vLLM has computed and still holds, with the request id and vLLM's sampling
    parameters that continue it."""

    request_id: str
    token_ids: TokenIds
    adapter: Adapter | None
    params: Any = field(default=None, eq=False)

    @property
    def key(self) -> tuple[Adapter | None, TokenIds]:
        return self.adapter, self.token_ids


class Sessions:
    """The idle sessions of one engine, least recently used first, and the pinned ones.

    Args:
        limit: The most sessions, pinned ones included.
        capacity: Tokens that the key/value cache holds.
        footprint: Tokens that a context of a given length takes in it.
        longest: The longest context, tokens: pinned sessions always leave room for one.
        reach: The most new tokens for which extending a session pays. With prefix caching a new
            request finds all full blocks, so beyond one block a session saves nothing.
    """

    def __init__(
        self,
        *,
        limit: int,
        capacity: int,
        footprint: Callable[[int], int],
        longest: int,
        reach: int,
    ) -> None:
        self._limit, self._capacity, self._footprint = limit, capacity, footprint
        self._longest, self._reach = longest, reach
        self._idle: OrderedDict[tuple[Adapter | None, TokenIds], Session] = OrderedDict()
        self._pinned: dict[tuple[Adapter | None, TokenIds], Session] = {}
        self._idle_tokens = 0

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    @property
    def pinned_tokens(self) -> int:
        """Tokens of the key/value cache that pinned sessions hold."""
        return sum(self._footprint(len(session.token_ids)) for session in self._pinned.values())

    @property
    def pinned(self) -> list[Query]:
        """What is pinned, oldest first."""
        return [Query(session.token_ids, session.adapter) for session in self._pinned.values()]

    def find(self, query: Query) -> Session | None:
        """The idle session with the longest context that ``query`` extends; ``None`` if none is
        within reach."""
        key = (query.adapter, query.token_ids[:-1])
        return self._idle.get(key) or self._longest_prefix(query)

    def take(self, query: Query) -> Session | None:
        """Take out what :meth:`find` finds."""
        session = self.find(query)
        return self._remove(session) if session else None

    def park(self, session: Session) -> list[Session]:
        """Keep ``session`` as the most recently used. Returns those to release: an equal one that
        it replaces."""
        twin = self._idle.get(session.key)
        released = [self._remove(twin)] if twin else []
        self._idle[session.key] = session
        self._idle_tokens += self._footprint(len(session.token_ids))
        return released

    def check_room_for_pin(self, query: Query) -> None:
        """Refuse a prefix that would leave too little room.

        Raises:
            EngineError: pinned contexts would leave no room for the longest context, or for other
                requests.
        """
        wanted = self.pinned_tokens + self._footprint(len(query.token_ids))
        if wanted + self._footprint(self._longest) > self._capacity:
            raise EngineError(
                f"pinning {len(query.token_ids)} more tokens would hold {wanted} of the "
                f"{self._capacity} tokens that the "
                f"key/value cache has, and {self._longest} must stay free; call clear_kv_cache(), "
                "or load with a larger "
                "kv_cache_memory_bytes or gpu_memory_utilization, or with a smaller max_model_len"
            )
        if len(self._pinned) >= self._limit:
            raise EngineError(
                f"{len(self._pinned)} prefixes are pinned, and the limit is {self._limit}; call "
                "clear_kv_cache(), or "
                "load with a larger max_num_seqs"
            )

    def pin(self, session: Session) -> None:
        """Keep ``session`` until :meth:`clear`, never to be extended itself."""
        self._pinned[session.key] = session

    def is_pinned(self, query: Query) -> bool:
        return (query.adapter, query.token_ids) in self._pinned

    def trim(self, tokens_in_flight: int) -> list[Session]:
        """Take out the least recently used until the rest is within the limit and fits with the
        requests in flight."""
        released, free = [], self._capacity - self.pinned_tokens - tokens_in_flight
        while self._idle and (len(self) > self._limit or self._idle_tokens > free):
            released.append(self._remove(next(iter(self._idle.values()))))
        return released

    def drop(self, adapter: Adapter) -> list[Session]:
        """Take out everything computed with ``adapter``, pinned or not."""
        gone = [session for session in self._pinned.values() if session.adapter == adapter]
        for session in gone:
            del self._pinned[session.key]
        return gone + [
            self._remove(idle) for idle in list(self._idle.values()) if idle.adapter == adapter
        ]

    def clear(self) -> list[Session]:
        """Take out everything."""
        released = [*self._pinned.values(), *self._idle.values()]
        self._pinned.clear()
        self._idle.clear()
        self._idle_tokens = 0
        return released

    def _longest_prefix(self, query: Query) -> Session | None:
        """A scan: at most ``limit`` comparisons of one token, and whole contexts are compared only
        if it is equal."""
        ids, best = query.token_ids, None
        for session in self._idle.values():
            size = len(session.token_ids)
            if (
                size < len(ids)
                and len(ids) - size <= self._reach
                and (best is None or size > len(best.token_ids))
                and session.token_ids[-1] == ids[size - 1]
                and session.adapter == query.adapter
                and session.token_ids == ids[:size]
            ):
                best = session
        return best

    def _remove(self, session: Session) -> Session:
        del self._idle[session.key]
        self._idle_tokens -= self._footprint(len(session.token_ids))
        return session
