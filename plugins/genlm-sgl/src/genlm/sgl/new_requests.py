"""Requests that were not handed to SGLang yet. Of requests with a common prefix, one goes first.

SGLang finds prefixes that earlier steps have computed, but not those of the same step. So a new
prompt would be computed once for each of its continuations that are requested together.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import define

from genlm.core import Query
from genlm.kit.new_requests import MIN_TOKENS_TO_WAIT, Leaders
from genlm.kit.prefixes import key_of
from genlm.sgl.internals import Scheduler


@define(eq=False)
class NewRequest:
    """One request.

    Attributes:
        key: The name of the request in SGLang.
        query: The prompt.
        adapter: The id of its adapter in SGLang.
        draw: SGLang's sampling parameters, for a sample.
        scored: How many tokens at the end of the prompt are scored.
    """

    key: str
    query: Query
    adapter: str | None
    draw: Mapping[str, Any] | None = None
    scored: int = 0

    @property
    def unscored(self) -> int:
        """How many tokens come before the scored ones."""
        return self.query.length - self.scored

    @property
    def prompt(self) -> bytes:
        """The key of the prefix that the request may share, see
        :func:`~genlm.kit.prefixes.key_of`."""
        adapter = self.query.adapter
        return key_of(adapter.version if adapter else 0, self.query.token_ids[: self.unscored])


class NewRequests:
    """The new requests of one engine.

    Args:
        scheduler: SGLang's scheduler.
        least_saved: Requests wait only if this saves at least so many tokens in all.
    """

    def __init__(self, scheduler: Scheduler, least_saved: int) -> None:
        self._scheduler = scheduler
        self._each = max(MIN_TOKENS_TO_WAIT, scheduler.page_size)
        self._leaders: Leaders[NewRequest] = Leaders(least_saved, self._each)
        self._waiting: dict[str, NewRequest] = {}
        self._begun: list[NewRequest] = []  # requests in SGLang for which others may wait

    def add(self, new_request: NewRequest) -> None:
        self._waiting[new_request.key] = new_request

    def drop(self, key: str) -> bool:
        """Drop a request. Returns whether it was still waiting here; otherwise SGLang has it."""
        return self._waiting.pop(key, None) is not None

    def clear(self) -> None:
        self._waiting.clear()
        self._begun.clear()

    def admit(self) -> None:
        """Hand all requests to SGLang, except those that should wait for another one."""
        computing = self._scheduler.computing
        self._begun = [each for each in self._begun if each.key in computing]
        some = [each for each in self._waiting.values() if self._may_share(each)]
        alone = len(some) + len(self._begun) < 2
        wait = set() if alone else self._that_wait(some)
        self._begun += [each for each in some if each not in wait]
        for each in [each for each in self._waiting.values() if each not in wait]:
            self._submit(self._waiting.pop(each.key))

    def _may_share(self, new_request: NewRequest) -> bool:
        query = new_request.query
        return (
            self._scheduler.keeps_prompts and new_request.unscored > self._each and not query.cold
        )

    def _that_wait(self, some: list[NewRequest]) -> set[NewRequest]:
        found = self._scheduler.known([(each.query.token_ids, each.adapter) for each in some])
        known = dict(zip(some, found, strict=True))
        return self._leaders.waiting(
            {each: each.prompt for each in self._begun},
            {each: each.prompt for each in some},
            lambda one, shared: min(known[one], shared),
        )

    def _submit(self, new_request: NewRequest) -> None:
        # The namespace of a cold query is its own, so nothing is cached in it.
        self._scheduler.submit(
            new_request.key,
            new_request.query.token_ids,
            adapter=new_request.adapter,
            namespace=f"cold-{new_request.key}" if new_request.query.cold else None,
            draw=new_request.draw,
            scored_from=new_request.unscored if new_request.scored else None,
        )
