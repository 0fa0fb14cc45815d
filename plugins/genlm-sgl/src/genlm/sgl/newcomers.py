"""Requests that SGLang has not got yet: of those that begin alike, one goes first.

SGLang finds what was computed before, and not what the same step computes: a new prompt would be
computed once for each of its continuations that are asked together.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from attrs import define

from genlm.core import Query
from genlm.sgl.internals import Scheduler

#: So many tokens are worth a step of waiting.
WORTH = 8


@define(eq=False)
class Newcomer:
    """One request.

    Attributes:
        key: Its name in SGLang.
        query: Its prompt.
        adapter: The id of its adapter in SGLang.
        draw: SGLang's sampling parameters, for a draw.
        leader: The one that computes its beginning.
        known: How many of its tokens SGLang knew when it last waited; -1 before.
    """

    key: str
    query: Query
    adapter: str | None
    draw: Mapping[str, Any] | None
    leader: Newcomer | None = None
    known: int = -1


class Newcomers:
    """Those of one engine."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._worth = max(WORTH, scheduler.page_size)
        self._waiting: dict[str, Newcomer] = {}
        self._leading: list[Newcomer] = []  # those in SGLang for which others may wait

    def add(self, newcomer: Newcomer) -> None:
        self._waiting[newcomer.key] = newcomer

    def drop(self, key: str) -> bool:
        """Whether it was here; else SGLang has it."""
        return self._waiting.pop(key, None) is not None

    def clear(self) -> None:
        self._waiting.clear()
        self._leading.clear()

    def admit(self) -> None:
        """Hand to SGLang all but those whose beginning another one computes."""
        if not self._waiting:
            return
        computing = self._scheduler.computing
        self._leading = [each for each in self._leading if each.key in computing]
        known = self._known([*self._leading, *self._waiting.values()])
        leaders = {self._beginning(each, known): each for each in self._leading}
        wait = set()
        # The longest leads: it may have the others in it.
        for each in sorted(self._waiting.values(), key=lambda each: -each.query.length):
            beginning = self._beginning(each, known)
            if beginning is None:
                continue
            leader = leaders.setdefault(beginning, each)
            # Who has waited for one in vain waits for no other.
            if leader is not each and (leader is each.leader or known[each] > each.known):
                each.leader, each.known = leader, known[each]
                wait.add(each)
            else:
                self._leading.append(each)
        for each in [each for each in self._waiting.values() if each not in wait]:
            self._submit(self._waiting.pop(each.key))

    def _known(self, newcomers: Sequence[Newcomer]) -> dict[Newcomer, int]:
        """How many first tokens SGLang finds, of each that may share some."""
        if not self._scheduler.keeps_prompts:
            return {}
        long = [
            each for each in newcomers if each.query.length > self._worth and not each.query.cold
        ]
        found = self._scheduler.known([(each.query.token_ids, each.adapter) for each in long])
        return dict(zip(long, found, strict=True))

    def _beginning(self, newcomer: Newcomer, known: Mapping[Newcomer, int]) -> Hashable:
        """Equal for two that compute the same tokens first; ``None`` for one that computes few."""
        least = known.get(newcomer, newcomer.query.length) + self._worth
        if newcomer.query.length <= least:
            return None
        return newcomer.adapter, newcomer.query.token_ids[:least]

    def _submit(self, newcomer: Newcomer) -> None:
        # Nothing was ever cached in a cold query's own namespace.
        self._scheduler.submit(
            newcomer.key,
            newcomer.query.token_ids,
            adapter=newcomer.adapter,
            namespace=f"cold-{newcomer.key}" if newcomer.query.cold else None,
            draw=newcomer.draw,
        )
