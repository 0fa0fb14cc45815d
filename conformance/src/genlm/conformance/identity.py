"""Clauses on identity: requests and state that are alike in much, and are not the same."""

from __future__ import annotations

import asyncio

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import Violation, brief, check
from genlm.conformance.driver import Outcome, started, submitted
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: The lengths of the chunks that are exchanged: those of the blocks of paged caches.
CHUNK_TOKENS = (8, 16, 32, 64)


class IdentityClauses:
    """Clauses on the identity of a context: all of its tokens, in order, and the adapter."""

    @advise(
        "a dropped request is looked up by its tokens; compare whole requests, which include "
        "the adapter",
        "cancelled_requests_leave_nothing",
        capability="cancelling",
    )
    def test_dropped_under_one_adapter(self, live: Subject) -> None:
        """One context is asked for under the base model and under two adapters, and one of these
        requests is dropped: the other two get the right answers."""
        names = [None, *live.needs_adapters(2)[:2]]
        if not live.lm.supports("genlm_step", "dropped"):
            pytest.skip("the engine takes nothing back (genlm_step without `dropped`)")
        contexts = live.contexts
        room = min(live.longest, contexts.limit)
        cases = [(gone, min(3, room)) for gone in names]
        cases += [(gone, min(300, room)) for gone in names[:: 1 if live.effort >= 1 else 2]]
        for gone, length in cases:
            context = contexts.long(length, 2)
            live.model.reset()
            for name in names:
                live.cold(context, name)
            outcomes = live.drive(self._one_leaves(live, context, names, gone))
            who = f"adapter {gone!r}" if gone else "the base model"
            for name, outcome in outcomes.items():
                whose = f"adapter {name!r}" if name else "the base model"
                what = f"{brief(context)} under {whose}"
                how = f"{what}, while the same context was dropped under {who}"
                check(
                    not isinstance(outcome, asyncio.CancelledError),
                    f"{how}, is never answered: what is dropped is a request, and not all requests "
                    "of its tokens",
                )
                live.expect.row(outcome, context, name, how=f"dropped under {who} meanwhile")

    async def _one_leaves(
        self, live: Subject, context: TokenIds, names: list[str | None], gone: str | None
    ) -> dict[str | None, Outcome]:
        """The outcomes of the requests that stay. Unanswered requests are cancelled in the end."""
        asked: dict[str | None, asyncio.Future[Outcome]] = {}

        async def leave() -> None:
            if (leaving := asked.get(gone)) is not None and not leaving.done():
                leaving.cancel()
                await submitted()

        async with live.after_each_call(leave):
            with live.gate.held():
                for name in names:
                    row = live.lm.next_token_logprobs(context, lora_name=name)
                    (asked[name],) = await started(row)
            await live.all_done([*asked.values()])
            for one in asked.values():
                one.cancel()
        outcomes = await asyncio.gather(*asked.values(), return_exceptions=True)
        return {name: one for name, one in zip(asked, outcomes, strict=True) if name != gone}

    @advise(
        "the hash of a block combines the hashes of earlier blocks without their order, by a "
        "sum or xor",
        "equal_ends_behind_different_beginnings",
    )
    def test_chunks_in_another_order(self, live: Subject) -> None:
        """Contexts made of the same chunks of 8, 16, 32 or 64 tokens in different orders, asked for
        in turn and then extended, have their cold rows: kept blocks are identified by all tokens
        before them, in order."""
        contexts = live.contexts
        room = min(live.longest, contexts.limit) - 1
        sizes = [size for size in CHUNK_TOKENS if 3 * size <= room]
        if live.effort < 1:
            sizes = sizes[-2:]  # Chunks of 64 tokens are whole blocks of 8, 16 and 32, too.
        if not sizes:
            pytest.skip(f"contexts have at most {room} tokens: no room for three chunks")
        for size in sizes:
            a, b, c = (contexts.long(3 * size, 1)[i * size :][:size] for i in range(3))
            orders = {"A B C": a + b + c, "B A C": b + a + c, "A C B": a + c + b}
            if live.effort >= 1:
                orders["C B A"] = c + b + a
            live.model.clear()
            for context in orders.values():
                live.ask(context)
            live.lm.clear_cache()
            for order, context in orders.items():
                for asked in ((*context, contexts.tokens[0]), context):
                    try:
                        live.check_row(asked, how="after others of the same chunks")
                    except Violation as violation:
                        raise Violation(
                            f"chunks of {size} tokens in the order {order}, after "
                            f"{', '.join(orders)}: {violation}"
                        ) from violation
