"""Clauses on callers: many of them, in any loop and thread."""

from __future__ import annotations

import asyncio
import functools
import itertools

from hypothesis import strategies as st

from genlm.conformance.compare import answered, check
from genlm.conformance.driver import Outcome, started
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core.errors import QueriesResetError
from genlm.core.types import TokenIds


class CallerClauses:
    """Clauses that callers do not affect each other."""

    def test_reset_fails_what_is_pending(self, live: Subject) -> None:
        """``reset_async_queries`` answers every waiting caller with an error at once; the model
        goes on."""

        @for_all(live, examples=5, contexts=live.contexts.distinct())
        def reset_fails_what_is_pending(contexts: list[TokenIds]) -> None:
            async def scenario() -> tuple[Outcome, list[Outcome]]:
                with live.gate.held():
                    # The engine is busy with this request, so that all others wait.
                    (blocker,) = await started(live.lm.next_token_logprobs(live.contexts.stem[:2]))
                    await live.gate.until_held()
                    tasks = await started(*map(live.lm.next_token_logprobs, contexts))
                    live.lm.reset_async_queries()
                    dropped = await live.soon(asyncio.gather(*tasks, return_exceptions=True))
                return await live.soon(blocker), dropped

            taken, dropped = live.run(scenario())
            for outcome in dropped:
                check(
                    isinstance(outcome, QueriesResetError),
                    f"a request pending at the reset ended in {outcome!r:.200}",
                )
            how = "in the engine's hands during a reset"
            live.expect.row(taken, live.contexts.stem[:2], how=how)
            live.check_rows(contexts, how="after a reset")

    def test_blocking_call_inside_a_running_loop(self, live: Subject) -> None:
        """A blocking call works inside a running event loop, also while that loop's own requests
        are pending."""

        @for_all(live, examples=5, contexts=live.contexts.distinct(least=2, most=2))
        def blocking_call_inside_a_running_loop(contexts: list[TokenIds]) -> None:
            async def scenario() -> tuple[Outcome, Outcome]:
                (task,) = await started(live.lm.next_token_logprobs(contexts[0]))
                return live.lm.next_token_logprobs_sync(contexts[1]), await live.soon(task)

            # The loop runs in a thread, so that a hang is noticed: a blocked loop cannot be
            # interrupted.
            outcome = live.outcome(live.thread(lambda: live.run(scenario())))
            blocking, waiting = answered(outcome, "a blocking call inside a loop")
            live.expect.row(blocking, contexts[1], how="by a blocking call inside a running loop")
            how = "by a coroutine while a blocking call was made in its loop"
            live.expect.row(waiting, contexts[0], how=how)

    def test_several_threads(self, live: Subject) -> None:
        """Threads with blocking calls and threads with event loops of their own, all at once, get
        their cold rows."""

        @for_all(
            live,
            examples=10,
            shares=st.lists(live.contexts.distinct(least=1), min_size=2, max_size=4),
        )
        def several_threads(shares: list[list[TokenIds]]) -> None:
            def blocking(contexts: list[TokenIds]) -> list[Outcome]:
                return [live.lm.next_token_logprobs_sync(context) for context in contexts]

            ways = itertools.cycle((live.gather, blocking))
            calls = [
                live.thread(functools.partial(way, contexts))
                for way, contexts in zip(ways, shares, strict=False)
            ]
            for contexts, call in zip(shares, calls, strict=True):
                rows = answered(live.outcome(call), f"a thread among {len(shares)}")
                live.expect.rows(rows, contexts, how=f"by one of {len(shares)} threads")

    def test_loops_one_after_the_other(self, live: Subject) -> None:
        """The model works in one event loop after another, also when a loop was closed with
        requests pending."""

        @for_all(live, examples=5, contexts=live.contexts.distinct())
        def loops_one_after_the_other(contexts: list[TokenIds]) -> None:
            abandoned = asyncio.new_event_loop()
            # The loop would complain about tasks that are left in it.
            abandoned.set_exception_handler(lambda *_: None)
            tasks = [
                abandoned.create_task(live.lm.next_token_logprobs(context)) for context in contexts
            ]
            abandoned.run_until_complete(asyncio.sleep(0))
            abandoned.close()
            for _ in range(2):
                live.check_rows(contexts, how="in another event loop, after one was closed")
            del tasks
