"""Clauses on requests of different kinds and lengths that share one engine: none waits for the
long work of another."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from genlm.core.conformance.compare import check
from genlm.core.conformance.driver import Outcome, submitted
from genlm.core.conformance.gate import EngineCall
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

#: Tokens of a long draw.
LONG = 40

#: In how many calls of the engine a request must be answered, whatever stream of others never
#: pauses. Engines differ in how many calls a request takes; a starved one is not answered at all.
BOUND = 40

#: The same for an engine whose work may happen on several machines (it has ``genlm_wake``): while
#: one is slow, others may answer many calls.
BOUND_ELSEWHERE = 2000


class CompanyClauses:
    """Long work and short work together."""

    def test_short_draw_returns_before_a_long_one(self, live: Subject) -> None:
        """A draw of one token, asked together with one of many, is answered first."""
        self._needs_draws_in_steps(live)
        short, long = live.contexts.long(3, 2), live.contexts.long(5, 1)
        length = self._length(live, long)

        async def together() -> list[str]:
            return await _in_order(
                {
                    "long": asyncio.ensure_future(live.lm.sample(long, length, [], seed=1)),
                    "short": asyncio.ensure_future(live.lm.sample(short, 1, [], seed=2)),
                }
            )

        for _ in range(self._tries(live)):
            live.reset()
            if live.run(together())[0] == "short":
                return
        check(False, f"a draw of 1 token was answered after one of {length} tokens")

    def test_row_during_a_draw(self, live: Subject) -> None:
        """While a long draw is under way another one comes, then a third, then a row: it is
        answered before any draw ends, and is right."""
        self._needs_draws_in_steps(live)
        row, long = live.contexts.long(3, 2), live.contexts.long(5, 1)
        length = self._length(live, long)
        live.cold(row)
        lm = live.lm

        async def scenario() -> tuple[list[str], Outcome]:
            asked: dict[str, asyncio.Future[Outcome]] = {}
            live.gate.hold()
            for i in range(3):
                draw = lm.sample(long, length, [], seed=i)
                asked[f"draw {i}"] = asyncio.ensure_future(draw)
                await submitted()
                if i:  # the engine has been woken, if it waits for what is finished
                    live.gate.step()
                await asyncio.wrap_future(live.thread(live.gate.wait_inside))
            asked["row"] = asyncio.ensure_future(lm.next_token_logprobs(row))
            await submitted()
            live.gate.release()
            order = await _in_order(asked)
            return order, (await asyncio.gather(asked["row"], return_exceptions=True))[0]

        for _ in range(self._tries(live)):
            live.reset()
            order, answer = live.run(scenario())
            live.expect(answer, row, how=f"during draws of {length} tokens")
            if order[0] == "row":
                return
        check(
            False,
            f"a row asked in call 3 of a draw of {length} tokens was answered after the draw",
        )

    def test_cancelled_draw_ends(self, live: Subject) -> None:
        """A long draw whose caller has gone is not drawn to its end, and what is asked next is
        right."""
        self._needs_draws_in_steps(live)
        long = live.contexts.long(5, 1)
        length = self._length(live, long)
        takes = live.lm.supports
        if takes("genlm_step", "samples") and not takes("genlm_step", "dropped"):
            pytest.skip("the engine draws in its steps, and takes nothing back (no `dropped`)")

        async def scenario() -> None:
            with live.gate.held():
                draw = asyncio.ensure_future(live.lm.sample(long, length, [], seed=1))
                await submitted()
                await asyncio.wrap_future(live.thread(live.gate.wait_inside))
                draw.cancel()
                await submitted()

        live.reset()
        live.run(scenario())
        for row in (live.contexts.long(3, 2), live.contexts.long(4, 2)):
            live.expect(live.ask(row), row, how="after a draw was cancelled")
        calls = live.gate.recent_calls
        check(
            len(calls) < length,
            f"a draw of {length} tokens was cancelled in its first call; the engine was called "
            f"{len(calls)} times",
        )
        check(
            not any(query.token_ids[:5] == long for call in calls[1:] for query in call.answered),
            "a draw whose caller had gone was answered",
        )

    def test_nobody_is_passed_over(self, live: Subject) -> None:
        """A row and a draw are answered within a bounded number of calls of the engine, while every
        call brings another request."""
        elsewhere = live.lm.supports("genlm_wake")
        bound = BOUND_ELSEWHERE if elsewhere else BOUND
        contexts = live.contexts.many(bound + 12)
        victims = [context for context in contexts if len(context) > 4][:2]
        others = [c for c in contexts if not any(_of(c, victim) for victim in victims)]
        bound = min(bound, len(others))
        draws = "genlm_sample" not in self._hooks_of_a_draw(live)
        asked: dict[str, asyncio.Future[Outcome]] = {}
        stream: list[asyncio.Future[Outcome]] = []
        passed_over: set[str] = set()

        async def ask_another() -> None:
            context = others[len(stream)]
            stream.append(asyncio.ensure_future(live.lm.next_token_logprobs(context)))
            await submitted()

        async def after_a_call() -> None:
            waiting = {what for what, answer in asked.items() if not answer.done()}
            if len(stream) == bound:
                passed_over.update(waiting)
            elif waiting:
                await ask_another()

        async def scenario() -> Outcome:
            loop = asyncio.get_running_loop()

            def bring(ended: EngineCall) -> None:
                # A request that comes in now wakes the next call, if it can be woken. That one may
                # end before it has done anything, so there only a call that answers brings another.
                if ended.answered or not elsewhere:
                    # Before it returns: so the next one has a newcomer.
                    live.wait(asyncio.run_coroutine_threadsafe(after_a_call(), loop))

            with live.gate.held():
                await ask_another()
                await asyncio.wrap_future(live.thread(live.gate.wait_inside))
                asked["a row"] = asyncio.ensure_future(live.lm.next_token_logprobs(victims[0]))
                if draws:
                    drawn = live.lm.sample(victims[1], 2, [], seed=1)
                    asked["a draw of 2 tokens"] = asyncio.ensure_future(drawn)
                await submitted()
                live.gate.on_call = bring
            try:
                row, *_ = await asyncio.gather(*asked.values(), return_exceptions=True)
            finally:
                live.gate.on_call = None
            await asyncio.gather(*stream)
            return row

        live.reset()
        row = live.run(scenario())
        live.expect(row, victims[0], how="while others kept coming")
        check(
            not passed_over,
            f"{' and '.join(sorted(passed_over))} got no answer within {bound} calls of the "
            "engine, while each of them brought another request",
        )

    def _needs_draws_in_steps(self, live: Subject) -> None:
        if "genlm_sample" in self._hooks_of_a_draw(live):
            pytest.skip("the engine draws in one call of genlm_sample, not in its steps")

    def _hooks_of_a_draw(self, live: Subject) -> set[str]:
        live.reset()
        live.run(live.lm.sample(live.contexts.stem[:3], 2, [], seed=0))
        return {each.hook for each in live.gate.recent_calls}

    def _tries(self, live: Subject) -> int:
        """Once; but two machines race, and often the one with the long draw is the faster."""
        return 20 if live.lm.supports("genlm_wake") else 1

    def _length(self, live: Subject, prompt: TokenIds) -> int:
        return min(LONG, live.contexts.limit - len(prompt))


async def _in_order(asked: Mapping[str, asyncio.Future[Outcome]]) -> list[str]:
    """Names in the order in which they are answered."""
    order: list[str] = []
    for name, future in asked.items():
        future.add_done_callback(lambda _, name=name: order.append(name))  # type: ignore[misc]
    await asyncio.wait(asked.values())
    await asyncio.sleep(0)  # callbacks are called in the pass after
    return order


def _of(token_ids: TokenIds, prompt: TokenIds) -> bool:
    return token_ids[: len(prompt)] == prompt
