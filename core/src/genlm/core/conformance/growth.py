"""Clauses on state that grows, moves and goes: long contexts, pinned ones, adapters that come again
and again."""

from __future__ import annotations

from genlm.core.conformance.cast import MOVING
from genlm.core.conformance.compare import Violation
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds


class GrowthClauses:
    """Tables grow and are moved together, and nothing is lost."""

    def test_long_contexts_grow(self, live: Subject) -> None:
        """Dozens of long contexts are held, more arrive, some go with their adapter, the first are
        extended, and many fork from one: all have their cold rows."""
        contexts = live.contexts
        most = min(live.longest, contexts.limit - 2)
        lengths = [most - 7 * i % (most // 2 + 1) for i in range(20)] + [most // 3] * 12
        held = [contexts.long(max(1, length), i) for i, length in enumerate(lengths)]
        first, more = held[:10], held[10:]
        moving = next(iter(live.adapters), None) if live.lm.supports("genlm_add_lora") else None
        live.gather(first)
        if moving is not None:
            live.bind(MOVING, live.adapters[moving])
            live.gather([context[: most // 3 + 1] for context in more[:6]], [MOVING] * 6)
            live.remove(MOVING)
        for begin in range(0, len(more), 5):
            live.gather(more[begin : begin + 5])
        tokens = contexts.tokens
        for step in range(3):
            first = [(*context[:most], tokens[step])[: contexts.limit] for context in first[:6]]
            self._expect_all(live, first, f"after {step + 1} extensions, beside {len(held)} others")
        for parent in (held[0], held[-1]):
            cut = 2 * len(parent) // 3
            ends = [(one, other) for one in tokens for other in tokens[:2]]
            forks = [(*parent[:cut], *end)[: contexts.limit] for end in ends]
            self._expect_all(live, forks, "one of several that fork from a long context")
            longer = [(*context, tokens[0])[: contexts.limit] for context in (parent, forks[-1])]
            self._expect_all(live, longer, "grown after others had forked from a long context")

    def test_pinned_contexts_are_moved_with_the_others(self, live: Subject) -> None:
        """Contexts are pinned, state of others is freed, much more is asked, and the pinned ones
        are extended, twice over: all have their cold rows."""
        live.needs("genlm_cache_prefix")
        contexts = live.contexts
        room = contexts.limit - 2
        pinned = [contexts.long(min(n, room, live.longest), i) for i, n in enumerate((20, 90, 300))]
        adapter = next(iter(live.adapters), None) if live.lm.supports("genlm_add_lora") else None
        many = contexts.many(live.scaled(120, 80))
        long = [contexts.long(min(200, room, live.longest), 3 + i) for i in range(12)]
        for context in pinned:
            live.lm.cache_kv(context)
        for turn, token in enumerate(contexts.tokens[:2]):
            if adapter is not None:
                live.bind(MOVING, live.adapters[adapter])
                live.gather(long[:4], [MOVING] * 4)
                live.remove(MOVING)
            live.gather(many[turn::2])
            live.gather(long[turn::2])
            longer = [(*context, token) for context in pinned]
            self._expect_all(live, longer, "extending a pinned one, after others came and went")

    def test_adapters_are_bound_and_pinned_again_and_again(self, live: Subject) -> None:
        """Hundreds of times a name is bound anew and a context is pinned with it, and nothing is
        cleared: every pin is taken, and the rows are those of the adapter that is bound."""
        live.needs("genlm_cache_prefix")
        names = live.needs_adapters(2)[:2]
        contexts = live.contexts
        longest = min(60, contexts.limit - 1)
        times = live.scaled(260, 100)
        for turn in range(times):
            name = names[turn % 2]
            live.bind(MOVING, live.adapters[name])
            context = contexts.long(longest, turn % 6)
            try:
                live.lm.cache_kv(context, lora_name=MOVING)
            except Exception as error:
                raise Violation(
                    f"{turn + 1} times a name was bound and {longest} tokens were pinned with it; "
                    f"of all these pins one is left, and the last one failed: {error}"
                ) from error
            if turn % 50 < 2 or turn == times - 1:
                longer = (*context, contexts.tokens[0])
                (row,) = live.gather([longer], [MOVING])
                how = f"pinned with {MOVING!r}, which was bound to {name!r}, for time {turn + 1}"
                live.expect(row, longer, name, how=how)
        live.remove(MOVING)

    def _expect_all(self, live: Subject, contexts: list[TokenIds], how: str) -> None:
        live.lm.clear_cache()
        for row, context in zip(live.gather(contexts), contexts, strict=True):
            live.expect(row, context, how=how)
