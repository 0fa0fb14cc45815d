"""Clauses on requests that share one engine: none waits for the long work of another, nor behind a
crowd."""

from __future__ import annotations

import asyncio
import time

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import Violation, check
from genlm.conformance.driver import Outcome, in_order, started, submitted
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: The tokens of a long sample.
LONG_DRAW_TOKENS = 40

#: The most calls of the engine until a request is answered, while a stream of others never pauses.
#: Engines differ in how many calls a request takes; a starved request is not answered at all.
MAX_CALLS = 40

#: The same for an engine whose work may happen on several machines (it has ``genlm_wake``): while
#: one is slow, others may answer many calls.
MAX_CALLS_ELSEWHERE = 2000

#: The numbers of the lines of a step's Python code at which it is woken.
WAKE_LINES = (0, 1, 2, 3, 4, 5, 6, 8, 10, 14, 20, 35, 50, 100, 300, 1000)

#: How often a step is woken at most, and the part of the patience that a wake may take.
MAX_WAKES, WAKE_PATIENCES = 4, 1 / 240

#: How many requests each caller of a crowd makes on average. A waiting request must be answered
#: before three quarters of the crowd's.
REQUESTS_A_CALLER = 8

#: The requests that wait among the crowd.
WAITING_REQUESTS = (
    "a row",
    "a draw of 2 tokens",
    "a score of 2 tokens",
    "a row that was asked first",
)


class ContentionClauses:
    """Long work and short work together, and whose turn it is."""

    @advise(
        "short requests are always served first", "nobody_is_passed_over", capability="fairness"
    )
    def test_nobody_waits_behind_a_crowd(self, live: Subject) -> None:
        """A long row, a sample and a score are answered, correctly, while 64 callers with short
        contexts ask again soon after each answer."""
        callers = live.scaled(64, 32)
        contexts = live.contexts
        crowd = contexts.many(callers * REQUESTS_A_CALLER)
        left = iter(crowd)
        long = contexts.long(min(100, contexts.limit - 3, live.longest), 3)
        tokens = contexts.tokens[:2]
        row, drawn, scored, early = long, long[:-1], long[:-2], (*long[:-2], tokens[0])
        waiting: dict[str, asyncio.Future[Outcome]] = {}
        passed_over: list[str] = []
        answered = 0
        call_ended = asyncio.Event()

        async def one_of_the_crowd(number: int) -> None:
            nonlocal answered
            # Half of them begin a call later, so that new requests come with every call.
            if number % 2:
                await call_ended.wait()
            # A caller that is answered sooner asks more often.
            for context in left:
                await live.lm.next_token_logprobs(context)
                answered += 1
                # Not all of the crowd's requests count: at the end the crowd gets smaller.
                if answered == 3 * len(crowd) // 4:
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
                first = await started(live.lm.next_token_logprobs(early))
                others = [asyncio.ensure_future(one_of_the_crowd(n)) for n in range(callers)]
                asked = await started(
                    live.lm.next_token_logprobs(row),
                    live.lm.sample(drawn, 2, [], temperature=0.0),
                    live.lm.sequence_logprobs(scored, tokens),
                )
                waiting.update(zip(WAITING_REQUESTS, [*asked, *first], strict=True))
            async with live.after_each_call(call_ends):
                await live.all_done([*asked, *first])
                # Some may not be answered at all.
                for one in (*others, *asked, *first):
                    one.cancel()
            return await asyncio.gather(*asked, *first, return_exceptions=True)

        live.model.reset()
        outcomes = live.drive(scenario())
        how = f"while {callers} callers ask again and again"
        check(
            not passed_over,
            f"{' and '.join(passed_over)} got no answer while {callers} others, who came together "
            f"with them, asked again and again, and were answered {3 * len(crowd) // 4} times",
        )
        for what, outcome in zip(waiting, outcomes, strict=True):
            check(not isinstance(outcome, BaseException), f"{what}, {how}: {outcome!r}")
        live.expect.rows([outcomes[0], outcomes[3]], [row, early], how=how)
        live.expect.greedy(outcomes[1], drawn, how=how)
        live.expect.scores(outcomes[2], scored, tuple(tokens), how=how)

    @advise(
        "a batch of draws is returned when its longest ends",
        "row_during_a_draw",
        capability="fairness",
    )
    def test_short_draw_returns_before_a_long_one(self, live: Subject) -> None:
        """A sample of one token, asked together with one of many, is answered first."""
        short = live.contexts.long(3, 2)
        long, length = self._long_draw(live)

        async def together() -> list[str]:
            asked = {
                "long": asyncio.ensure_future(live.lm.sample(long, length, [], seed=length)),
                "short": asyncio.ensure_future(live.lm.sample(short, 1, [], seed=1)),
            }
            return await in_order(asked)

        for _ in range(self._tries(live)):
            live.model.reset()
            if live.run(together())[0] == "short":
                return
        raise Violation(
            f"a draw of 1 token was answered after a draw of {length} tokens, although both were "
            "asked for together"
        )

    @advise(
        "rows wait until nothing is drawn, or a wake-up is lost",
        "short_draw_returns_before_a_long_one",
        capability="fairness",
    )
    def test_row_during_a_draw(self, live: Subject) -> None:
        """While long samples run, a row that is asked for is answered before any of the samples
        ends, and is right."""
        row = live.contexts.long(3, 2)
        long, length = self._long_draw(live)
        live.cold(row)
        lm = live.lm

        async def scenario() -> tuple[list[str], Outcome]:
            asked: dict[str, asyncio.Future[Outcome]] = {}
            live.gate.hold()
            for i in range(3):
                (asked[f"draw {i}"],) = await started(lm.sample(long, length, [], seed=i))
                # An engine that waits for its work to finish has been woken by the request.
                if i:
                    live.gate.release(calls=1)
                await live.gate.until_held()
            (asked["row"],) = await started(lm.next_token_logprobs(row))
            live.gate.release()
            order = await in_order(asked)
            return order, (await asyncio.gather(asked["row"], return_exceptions=True))[0]

        for _ in range(self._tries(live)):
            live.model.reset()
            order, answer = live.run(scenario())
            live.expect.row(answer, row, how=f"during draws of {length} tokens")
            if order[0] == "row":
                return
        wakes = lm.supports("genlm_wake")
        woken = "; genlm_wake must end the step, and the next ones compute both" if wakes else ""
        raise Violation(
            f"a row that was asked for in call 3 of a draw of {length} tokens was answered after "
            f"the whole draw{woken}"
        )

    @advise(
        "a step does not read `dropped` while a draw runs",
        "cancelled_requests_leave_nothing",
        capability="cancelling",
    )
    def test_cancelled_draw_ends(self, live: Subject) -> None:
        """A cancelled long sample is not drawn to its end, and later requests get the right
        answers."""
        long, length = self._long_draw(live)
        takes = live.lm.supports
        if takes("genlm_step", "samples") and not takes("genlm_step", "dropped"):
            pytest.skip("the engine draws in its steps, and takes nothing back (no `dropped`)")

        async def scenario() -> None:
            with live.gate.held():
                (draw,) = await started(live.lm.sample(long, length, [], seed=1))
                await live.gate.until_held()
                draw.cancel()
                await submitted()

        live.model.reset()
        live.run(scenario())
        for row in (live.contexts.long(3, 2), live.contexts.long(4, 2)):
            live.check_row(row, how="after a draw was cancelled")
        calls = live.gate.recent_calls
        check(
            len(calls) < length,
            f"a draw of {length} tokens was cancelled in its first call; the engine was called "
            f"{len(calls)} times, and for the whole draw it is called {length} times",
        )
        check(
            not any(query.token_ids[:5] == long for call in calls[1:] for query in call.answered),
            "the engine answered a draw after its caller had cancelled it",
        )

    @advise(
        "genlm_wake takes a lock that a step holds; write a byte into a pipe or use a Mailbox",
        "wake_returns_while_a_step_runs",
        capability="wake",
    )
    def test_wake_in_the_middle_of_a_step(self, live: Subject) -> None:
        """``genlm_wake`` returns at once, and does not raise, when it is called in the middle of a
        line of a step, as the garbage collector may do: it waits for no lock that a step holds."""
        live.needs("genlm_wake")
        contexts = live.contexts.many(2 * len(WAKE_LINES))
        hung: list[Violation] = []

        async def ask(context: TokenIds, line: int, beside: TokenIds) -> list[Outcome]:
            asked: list[asyncio.Future[Outcome]] = []

            async def ask_another() -> None:
                asked.extend(await started(live.lm.next_token_logprobs(beside)))

            call = live.here(ask_another, "asking for another row")

            def in_the_middle() -> None:
                try:
                    call()
                except Violation as violation:
                    # The step must go on.
                    hung.append(violation)

            live.gate.on_line = line, in_the_middle
            try:
                return [await live.lm.next_token_logprobs(context), *await asyncio.gather(*asked)]
            finally:
                live.gate.on_line = None

        live.model.reset()
        for line, context, beside in zip(
            WAKE_LINES, contexts, contexts[len(WAKE_LINES) :], strict=False
        ):
            try:
                rows = live.run(ask(context, line, beside))
            finally:
                check(
                    not hung,
                    f"in the middle of a step, at line {line} of the Python code that it runs, "
                    f"{'; '.join(map(str, hung))}; genlm_wake must wait for no lock that a step "
                    "holds",
                )
            said = map(str, live.gate.violations)
            raised = [each for each in said if "genlm_wake raised" in each]
            live.gate.told.update(raised)
            check(not raised, "; ".join(raised[:1]))
            live.expect.rows(
                rows, [context, beside][: len(rows)], how="asked for in the middle of a step"
            )

    @advise(
        "genlm_wake waits for a lock that a step holds while it computes",
        "wake_in_the_middle_of_a_step",
        capability="wake",
    )
    def test_wake_returns_while_a_step_runs(self, live: Subject) -> None:
        """``genlm_wake`` returns while the step still runs, also where a step takes seconds: else
        asking for a row stops the event loop of its caller."""
        live.needs("genlm_wake")
        contexts = live.contexts.many(2 * MAX_WAKES)
        most = live.patience * WAKE_PATIENCES
        stalls: list[float] = []

        async def ask_beside(context: TokenIds, beside: TokenIds) -> list[Outcome]:
            with live.gate.held():
                (first,) = await started(live.lm.next_token_logprobs(context))
                await live.gate.until_held()
            await asyncio.sleep(0.02)  # Then the step is under way, unless it takes less.
            began = time.perf_counter()
            (second,) = await started(live.lm.next_token_logprobs(beside))
            stalls.append(time.perf_counter() - began)
            return [await first, await second]

        live.model.reset()
        for context, beside in zip(contexts, contexts[MAX_WAKES:], strict=False):
            rows = live.run(ask_beside(context, beside))
            live.expect.rows(rows, [context, beside], how="asked for while a step ran")
            # The machine may have had other work in the turns before.
            if stalls[-1] < most:
                return
        raise Violation(
            f"asking for a row while a step ran stopped the event loop for {min(stalls):.2g} s or "
            f"more, {len(stalls)} times of {len(stalls)}: genlm_wake must return at once, and wait "
            "for nothing that a step holds"
        )

    @advise(
        "new requests are served before those in flight",
        "nobody_waits_behind_a_crowd",
        capability="fairness",
    )
    def test_nobody_is_passed_over(self, live: Subject) -> None:
        """A row and a sample are answered within a bounded number of calls of the engine, although
        every call brings another request."""
        elsewhere = live.lm.supports("genlm_wake")
        bound = MAX_CALLS_ELSEWHERE if elsewhere else MAX_CALLS
        contexts = live.contexts.many(bound + 12)
        victims = [context for context in contexts if len(context) > 4][:2]
        others = [c for c in contexts if all(c[: len(one)] != one for one in victims)]
        bound = min(bound, len(others))
        draws = "genlm_sample" not in self._hooks_of_a_draw(live)
        asked: dict[str, asyncio.Future[Outcome]] = {}
        stream: list[asyncio.Future[Outcome]] = []
        passed_over: set[str] = set()

        async def ask_another() -> None:
            stream.extend(await started(live.lm.next_token_logprobs(others[len(stream)])))

        async def after_a_call() -> None:
            # A request that comes in now wakes the next call of an engine with genlm_wake. That
            # call may end before it has done anything, so only a call that answers brings another.
            if elsewhere and not live.gate.recent_calls[-1].answered:
                return
            waiting = {what for what, answer in asked.items() if not answer.done()}
            if len(stream) == bound:
                passed_over.update(waiting)
            elif waiting:
                await ask_another()

        async def scenario() -> Outcome:
            live.gate.hold()
            await ask_another()
            await live.gate.until_held()
            (asked["a row"],) = await started(live.lm.next_token_logprobs(victims[0]))
            if draws:
                drawn = live.lm.sample(victims[1], 2, [], seed=1)
                (asked["a draw of 2 tokens"],) = await started(drawn)
            async with live.after_each_call(after_a_call):
                live.gate.release()
                row, *_ = await asyncio.gather(*asked.values(), return_exceptions=True)
            await asyncio.gather(*stream)
            return row

        live.model.reset()
        row = live.run(scenario())
        live.expect.row(row, victims[0], how="while every call brought another request")
        check(
            not passed_over,
            f"{' and '.join(sorted(passed_over))} got no answer within {bound} calls of the "
            "engine, while each of them brought another request",
        )

    def _long_draw(self, live: Subject) -> tuple[TokenIds, int]:
        """A prompt, and how many tokens to draw after it, where the engine draws in its steps."""
        if "genlm_sample" in self._hooks_of_a_draw(live):
            pytest.skip("the engine draws in one call of genlm_sample, not in its steps")
        prompt = live.contexts.long(5, 1)
        return prompt, min(LONG_DRAW_TOKENS, live.contexts.limit - len(prompt))

    def _hooks_of_a_draw(self, live: Subject) -> set[str]:
        live.model.reset()
        live.run(live.lm.sample(live.contexts.stem[:3], 2, [], seed=0))
        return {each.hook for each in live.gate.recent_calls}

    def _tries(self, live: Subject) -> int:
        """Once; more where two machines race, since the one with the long sample may be faster."""
        return 20 if live.lm.supports("genlm_wake") else 1
