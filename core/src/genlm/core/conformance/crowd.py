"""The clause on many callers that never pause."""

from __future__ import annotations

import asyncio

from genlm.core.conformance.agreement import expect_scores
from genlm.core.conformance.clock import after_each_call
from genlm.core.conformance.compare import check
from genlm.core.conformance.driver import Outcome, submitted
from genlm.core.conformance.subject import Subject

#: How often each of the crowd asks. Who waits must be answered before three quarters of all that
#: are.
TIMES = 8


class CrowdClauses:
    """Whose turn it is."""

    def test_nobody_waits_behind_a_crowd(self, live: Subject) -> None:
        """A long row, a draw and a score are answered, and right, while 64 callers with short
        contexts each ask again when the call after their answer ends."""
        callers = live.scaled(64, 20)
        contexts = live.contexts
        crowd = contexts.many(callers * TIMES)
        long = contexts.long(min(100, contexts.limit - 3, live.longest), 3)
        row, drawn, scored = long, long[:-1], long[:-2]
        tokens = contexts.tokens[:2]
        waiting: dict[str, asyncio.Future[Outcome]] = {}
        passed_over: list[str] = []
        answered = 0
        call_ended = asyncio.Event()

        async def one_of_the_crowd(number: int) -> None:
            nonlocal answered
            if number % 2:  # half of them begin a call later, so newcomers come with every call
                await call_ended.wait()
            for context in crowd[number::callers]:
                await live.lm.next_token_logprobs(context)
                answered += 1
                if answered == 3 * len(crowd) // 4:  # at the end the crowd is gone
                    passed_over.extend(name for name, one in waiting.items() if not one.done())
                if answered > 3 * len(crowd) // 4:
                    return
                await call_ended.wait()

        async def call_ends() -> None:
            nonlocal call_ended
            call_ended.set()
            call_ended = asyncio.Event()
            await submitted()

        async def scenario() -> list[Outcome]:
            with live.gate.held():
                others = [asyncio.ensure_future(one_of_the_crowd(n)) for n in range(callers)]
                for what, asked in (
                    ("a row", live.lm.next_token_logprobs(row)),
                    ("a draw of 2 tokens", live.lm.sample(drawn, 2, [], temperature=0.0)),
                    ("a score of 2 tokens", live.lm.sequence_logprobs(scored, tokens)),
                ):
                    waiting[what] = asyncio.ensure_future(asked)
                await submitted()
            async with after_each_call(live, call_ends):
                await live.all_done([*waiting.values()])
                for one in (*others, *waiting.values()):  # who is not answered at all
                    one.cancel()
            return list(await asyncio.gather(*waiting.values(), return_exceptions=True))

        live.reset()
        outcomes = live.drive(scenario())
        how = f"while {callers} callers ask again and again"
        check(
            not passed_over,
            f"{' and '.join(passed_over)} got no answer while {callers} others, who came together "
            f"with them, asked again and again, and were answered {3 * len(crowd) // 4} times",
        )
        for what, outcome in zip(waiting, outcomes, strict=True):
            check(not isinstance(outcome, BaseException), f"{what}, {how}: {outcome!r}")
        live.expect(outcomes[0], row, how=how)
        expect_scores(live, outcomes[2], scored, tuple(tokens), how=how)
