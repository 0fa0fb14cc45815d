"""Live sessions: contexts whose KV cache vLLM keeps, so that extending one costs only the new
tokens.

This module only keeps records; the engine drives vLLM. A session is an answered request that vLLM
still holds. It keeps its blocks and one of the scheduler's ``max_num_seqs`` places, so the number
of idle sessions is limited. Idle sessions are dropped when the KV cache is full: as long as they
and the contexts in flight fit in the cache together, vLLM can always continue.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable

from genlm.core.errors import EngineError
from genlm.core.types import Adapter, Query
from genlm.vllm.cache_usage import CacheUsage
from genlm.vllm.request import VllmRequest


class Sessions:
    """The idle sessions of one engine, least recently used first, and the pinned ones.

    Args:
        limit: The most sessions, pinned ones included, regardless of the number of requests in
            flight.
        places: The most sessions and requests in flight together. If few requests are in flight,
            this allows more sessions than ``limit``.
        capacity: How many tokens the KV cache holds.
        shared: How many tokens the blocks that contexts share have; ``None`` if contexts share no
            blocks.
        footprint: A function that gives the tokens of the KV cache that a context of a given length
            takes.
        longest: The longest context, in tokens. Pinned sessions always leave room for one.
        reach: The most new tokens for which extending a session is worth it. With prefix caching, a
            new request finds all full blocks, so beyond one block a session saves nothing.
        forks: Whether a new request finds all tokens that another one has, also in a partly filled
            block.
    """

    def __init__(
        self,
        *,
        limit: int,
        places: int,
        capacity: int,
        shared: int | None,
        footprint: Callable[[int], int],
        longest: int,
        reach: int,
        forks: bool,
    ) -> None:
        self._limit, self._places = limit, places
        self._capacity, self._footprint = capacity, footprint
        #: The usage of everything that vLLM has: sessions, and requests in flight.
        self.usage = CacheUsage(shared)
        self._pins = CacheUsage(shared)
        self._longest, self._reach, self._forks = longest, reach, forks
        # By adapter and hash. A context knows these of its parent too.
        self._idle: OrderedDict[tuple[Adapter | None, int], VllmRequest] = OrderedDict()
        self._taken: dict[tuple[Adapter | None, int], VllmRequest] = {}  # and not settled
        self._lengths: Counter[int] = Counter()  # of the idle ones, and of these
        self._pinned: dict[Query, VllmRequest] = {}

    def __len__(self) -> int:
        return len(self._idle) + len(self._pinned)

    @property
    def pinned_tokens(self) -> int:
        """How many tokens of the KV cache pinned sessions hold."""
        return self._pins.tokens

    def take(self, query: Query) -> VllmRequest | None:
        """Remove and return the idle session with the longest context that ``query`` extends.
        ``None`` if no session is within reach, or if a longer one has just been taken, so that a
        fork of that computes fewer tokens."""
        context, length = query.context, query.length
        for new in range(1, min(self._reach, length - 1) + 1):
            if not self._lengths.get(length - new):
                continue
            known = context.parent_hash if new == context.grown else context.first(-new).hash_value
            key = query.adapter, known
            if self._forks and key in self._taken:
                return None
            session = self._idle.get(key)
            if session is not None and context.starts_with(session.prompt.context):
                self._taken[key] = self._idle.pop(key)
                return session
        return None

    def taken_parent(self, query: Query) -> VllmRequest | None:
        """The session that has just been taken and has the context that ``query`` is known to
        extend. The query is then a fork of it."""
        return self._taken.get((query.adapter, query.context.parent_hash))

    def give_up_taken(self, session: VllmRequest) -> VllmRequest:
        """Note that a session that :meth:`take` returned is released after all, so that nothing can
        be forked from it. Returns the session."""
        del self._taken[_key(session)]
        return self._end(session)

    def settle(self) -> None:
        """Note that the taken sessions continue as longer contexts, so that they can no longer be
        forked at their former ends."""
        for session in self._taken.values():
            self._lengths[session.length] -= 1
        self._taken.clear()

    def park(self, session: VllmRequest) -> VllmRequest | None:
        """Keep ``session`` as the most recently used. Returns the session to release: an equal one
        that it replaces."""
        key = _key(session)
        equal = self._idle.get(key)
        released = None if equal is None else self._give_up(equal)
        self._idle[key] = session
        self._lengths[session.length] += 1
        return released

    def check_room_for_pin(self, request: VllmRequest) -> None:
        """Reject a prefix that would leave too little room.

        Raises:
            EngineError: pinned contexts would leave no room for the longest context, or for other
                requests.
        """
        self._pins.add(request)
        wanted = self._pins.tokens
        self._pins.remove(request)
        if wanted + (longest := self._footprint(self._longest)) > self._capacity:
            raise EngineError(
                f"pinning {request.length} more tokens would hold {wanted} of the "
                f"{self._capacity} tokens that the KV cache has, and {longest} must stay free; "
                "call clear_kv_cache(), or load with a larger kv_cache_memory_bytes or "
                "gpu_memory_utilization, or with a smaller max_model_len"
            )
        if len(self._pinned) >= self._limit:
            raise EngineError(
                f"{len(self._pinned)} prefixes are pinned, and the limit is {self._limit}; call "
                "clear_kv_cache(), or load with a larger max_num_seqs"
            )

    def pin(self, session: VllmRequest) -> None:
        """Keep ``session`` until :meth:`clear`, never to be extended itself."""
        self._pinned[session.prompt] = session
        self._pins.add(session)
        self._pins.complete(session)

    def is_pinned(self, query: Query) -> bool:
        return query in self._pinned

    def pinned(self) -> list[Query]:
        """The pinned prefixes."""
        return [*self._pinned]

    def trim(self, in_flight: int) -> list[VllmRequest]:
        """Remove and return the least recently used sessions, until the others are within the
        limits and fit in the cache with the requests in flight."""
        released, most = [], max(self._limit, self._places - in_flight)
        while self._idle and (len(self) > most or self.usage.tokens > self._capacity):
            released.append(self._give_up(next(iter(self._idle.values()))))
        return released

    def drop_idle(self) -> list[VllmRequest]:
        """Remove and return all sessions except the pinned ones."""
        return [self._give_up(each) for each in list(self._idle.values())]

    def drop(self, adapter: Adapter) -> list[VllmRequest]:
        """Remove and return all sessions computed with ``adapter``, pinned ones included."""
        queries = [query for query in self._pinned if query.adapter == adapter]
        pinned = [self._pinned.pop(query) for query in queries]
        for each in pinned:
            self.usage.remove(each)
            self._pins.remove(each)
        idle = [each for each in self._idle.values() if each.prompt.adapter == adapter]
        return [*pinned, *map(self._give_up, idle)]

    def clear(self) -> list[VllmRequest]:
        """Remove and return all sessions. No request may be in flight."""
        released = [*self._pinned.values(), *self._idle.values()]
        self._pinned.clear()
        self._idle.clear()
        self._taken.clear()
        self._lengths.clear()
        self.usage.clear()
        self._pins.clear()
        return released

    def _give_up(self, session: VllmRequest) -> VllmRequest:
        del self._idle[_key(session)]
        return self._end(session)

    def _end(self, session: VllmRequest) -> VllmRequest:
        self.usage.remove(session)
        self._lengths[session.length] -= 1
        return session


def _key(session: VllmRequest) -> tuple[Adapter | None, int]:
    return session.prompt.adapter, session.prompt.context.hash_value
