"""Clauses on callers: many of them, in any loop and thread, leaving and failing without a trace on
the others."""

from __future__ import annotations

import asyncio
import functools
import itertools

from hypothesis import strategies as st

from genlm.conformance.compare import answered, check
from genlm.conformance.driver import Outcome, started, submitted
from genlm.conformance.subject import Subject
from genlm.core.errors import EngineError, QueriesResetError
from genlm.core.types import TokenIds


class CallerClauses:
    """Callers do not disturb each other."""

    def test_cancelled_caller_leaves_others_alone(self, live: Subject) -> None:
        """Cancelling one caller, alone or beside another with the same request, leaves every other
        answer as it is."""

        @live.for_all(
            contexts=live.contexts.several(),
            cancelled=st.integers(0, 5),
            while_running=st.booleans(),
        )
        def cancelled_caller_leaves_others_alone(
            contexts: list[TokenIds], cancelled: int, while_running: bool
        ) -> None:
            cancelled %= len(contexts)

            async def scenario() -> list[Outcome]:
                with live.gate.held():
                    blocker = [] if while_running else await self._blocked(live)
                    tasks = await started(*map(live.lm.next_token_logprobs, contexts))
                    if while_running:
                        await live.engine_held()
                    tasks[cancelled].cancel()
                    await submitted()
                for one in blocker:
                    await live.soon(one)
                return await live.soon(asyncio.gather(*tasks, return_exceptions=True))

            outcomes = live.run(scenario())
            left = outcomes.pop(cancelled)
            gone = isinstance(left, asyncio.CancelledError)
            check(gone, f"the cancelled caller got {left!r:.200}")
            how = f"while the caller of {list(contexts[cancelled])} cancelled"
            live.expect_all(outcomes, contexts[:cancelled] + contexts[cancelled + 1 :], how=how)

    def test_abandoned_question_is_dropped(self, live: Subject) -> None:
        """A request all of whose callers have gone does not reach the engine."""

        @live.for_all(examples=5, context=live.contexts.any())
        def abandoned_question_is_dropped(context: TokenIds) -> None:
            async def scenario() -> None:
                ask = live.lm.next_token_logprobs
                with live.gate.held():
                    (blocker,) = await self._blocked(live)
                    for task in await started(ask(context), ask(context)):
                        task.cancel()
                    await submitted()
                await live.soon(blocker)

            live.run(scenario())
            live.check_row(live.contexts.stem[:5], how="after an abandoned request")
            seen = [query.token_ids for query in live.gate.seen]
            check(
                context not in seen,
                f"both callers of {list(context)} had cancelled, and the engine evaluated it",
            )

    async def _blocked(self, live: Subject) -> list[asyncio.Future[Outcome]]:
        """A request that the engine has in hand, so that all others wait."""
        blocker = await started(live.lm.next_token_logprobs(live.contexts.stem[:2]))
        await live.engine_held()
        return blocker

    def test_failing_question_fails_alone(self, live: Subject) -> None:
        """If the engine fails on one request of a batch, its caller gets the error and the others
        their rows."""

        @live.for_all(contexts=live.contexts.distinct(), failing=st.integers(0, 3))
        def failing_question_fails_alone(contexts: list[TokenIds], failing: int) -> None:
            bad = contexts[failing % len(contexts)]
            good = [context for context in contexts if context != bad]
            for context in good:
                live.cold(context)
            live.suite.poison.token_ids = bad
            for outcome, context in zip(live.gather(contexts), contexts, strict=True):
                if context == bad:
                    check(
                        isinstance(outcome, EngineError),
                        f"the engine failed on {list(bad)}; its caller got {outcome!r:.200}",
                    )
                else:
                    live.expect(outcome, context, how=f"in a batch in which {list(bad)} failed")
            live.suite.poison.token_ids = None
            live.check_row(bad, how="after it had failed once")

    def test_reset_fails_what_is_pending(self, live: Subject) -> None:
        """``reset_async_queries`` answers every waiting caller with an error at once; the model
        goes on."""

        @live.for_all(examples=5, contexts=live.contexts.distinct())
        def reset_fails_what_is_pending(contexts: list[TokenIds]) -> None:
            async def scenario() -> tuple[Outcome, list[Outcome]]:
                with live.gate.held():
                    (blocker,) = await self._blocked(live)
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
            live.expect(taken, live.contexts.stem[:2], how="in the engine's hands during a reset")
            live.check_rows(contexts, how="after a reset")

    def test_blocking_call_inside_a_running_loop(self, live: Subject) -> None:
        """A blocking call works inside a running event loop, also while that loop's own requests
        are pending."""

        @live.for_all(examples=5, contexts=live.contexts.distinct(least=2, most=2))
        def blocking_call_inside_a_running_loop(contexts: list[TokenIds]) -> None:
            async def scenario() -> tuple[Outcome, Outcome]:
                (task,) = await started(live.lm.next_token_logprobs(contexts[0]))
                return live.lm.next_token_logprobs_sync(contexts[1]), await live.soon(task)

            # In a thread, so that it is noticed if it hangs: nothing can interrupt a loop that is
            # blocked.
            outcome = live.outcome(live.thread(lambda: live.run(scenario())))
            blocking, waiting = answered(outcome, "a blocking call inside a loop")
            live.expect(blocking, contexts[1], how="by a blocking call inside a running loop")
            how = "by a coroutine while a blocking call was made in its loop"
            live.expect(waiting, contexts[0], how=how)

    def test_several_threads(self, live: Subject) -> None:
        """Threads with blocking calls and threads with event loops of their own, all at once, get
        their cold rows."""

        @live.for_all(
            examples=10, shares=st.lists(live.contexts.distinct(least=1), min_size=2, max_size=4)
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
                live.expect_all(rows, contexts, how=f"by one of {len(shares)} threads")

    def test_loops_one_after_the_other(self, live: Subject) -> None:
        """The model works in one event loop after another, also when a loop was closed with
        requests pending."""

        @live.for_all(examples=5, contexts=live.contexts.distinct())
        def loops_one_after_the_other(contexts: list[TokenIds]) -> None:
            abandoned = asyncio.new_event_loop()
            # It would complain of the tasks that are left in it.
            abandoned.set_exception_handler(lambda *_: None)
            tasks = [
                abandoned.create_task(live.lm.next_token_logprobs(context)) for context in contexts
            ]
            abandoned.run_until_complete(asyncio.sleep(0))
            abandoned.close()
            for _ in range(2):
                live.check_rows(contexts, how="in another event loop, after one was closed")
            del tasks
