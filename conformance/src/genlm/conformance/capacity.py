"""Clauses on capacity: what an engine has a number of is given back, and what is full is safe."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.agreement import SMALL_VOCABULARY_TOKENS, steady
from genlm.conformance.compare import ROUNDING_ATOL, Violation, check
from genlm.conformance.driver import Outcome, in_order, started, submitted
from genlm.conformance.scheduled import REBOUND_ADAPTER
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: In how many turns requests are cancelled in flight, and how many in each turn.
CANCELLING_TURNS, REQUESTS_A_TURN = 6, 64

#: The most tokens of the prompts of cancelled requests.
MAX_PROMPT_TOKENS = 100

#: How many samples are made together before and after the cancellations, and their tokens.
DRAWS_TOGETHER, DRAWN_TOKENS = 40, 6

#: How many samples, and as many scores, are asked for together beside pins.
SCORES_TOGETHER = 6

#: Tokens of these scores. Scores made in steps have more, so that some are preempted half done.
SCORED_TOKENS, TOKENS_SCORED_IN_STEPS = 40, 200

#: How many contexts are asked for between a pin and its use: more than engines keep beside pins.
OTHER_CONTEXTS = 320

#: How many times a prompt is pinned before each clear.
PINS_A_CLEAR = 8


class CapacityClauses:
    """Places, pins and memory."""

    @advise(
        "a slot is released when a request ends, but not when it is dropped",
        "cancelled_requests_leave_nothing",
        capability="cancelling",
    )
    def test_cancelled_requests_give_their_places_back(self, live: Subject) -> None:
        """After hundreds of samples and long rows are cancelled in flight, as many requests as
        before run together: samples take no more calls of the engine (not counted with
        ``genlm_wake``), and a short request does not wait for a long one."""
        if not live.lm.supports("genlm_step", "dropped"):
            pytest.skip("the engine takes nothing back (genlm_step without `dropped`)")
        contexts = live.contexts
        live.model.reset()
        before = self._calls(live, 0)
        overtook = self._short_overtakes(live)
        most = min(live.longest, contexts.limit - DRAWN_TOKENS, MAX_PROMPT_TOKENS)
        lengths = most, min(most, 20)  # A row of fewer tokens may be answered by the first call.
        cancelled = 0
        for turn in range(live.scaled(CANCELLING_TURNS, 3)):
            draws = turn % 2 == 0
            prompts = [
                contexts.long(max(1, lengths[draws] - i % 3), i + turn)
                for i in range(REQUESTS_A_TURN)
            ]
            cancelled += live.drive(self._all_leave(live, prompts, draws))
        after = self._calls(live, 1)
        told = (
            f"{cancelled} requests were cancelled while they were in flight; since then {{}}: the "
            "places of some were not given back"
        )
        # The calls of an engine with genlm_wake end by chance, so their number says nothing.
        wakes = live.lm.supports("genlm_wake")
        check(
            wakes or after <= before + max(2, before // 4),
            told.format(
                f"{DRAWS_TOGETHER} draws of {DRAWN_TOKENS} tokens take {after} calls of the engine "
                f"together, and took {before} before"
            ),
        )
        check(
            not overtook or self._short_overtakes(live),
            told.format("a draw of 1 token waits for the end of a longer one, and did not before"),
        )
        for row in (contexts.long(3, 2), contexts.long(max(1, most), 5)):
            live.check_row(row, how=f"after {cancelled} requests were cancelled in flight")

    def _calls(self, live: Subject, turn: int) -> int:
        """How many calls of the engine some samples take together."""
        prompts = [live.contexts.long(6 + i, i) for i in range(DRAWS_TOGETHER)]
        live.lm.clear_cache()
        begun = len(live.gate.recent_calls)
        live.run_all(
            live.lm.sample(prompt, DRAWN_TOKENS, [], seed=100 * turn + i)
            for i, prompt in enumerate(prompts)
        )
        return len(live.gate.recent_calls) - begun

    def _short_overtakes(self, live: Subject) -> bool:
        """Whether a sample of one token ends before one of many that was asked with it."""

        async def together() -> list[str]:
            long, short = await started(
                live.lm.sample(live.contexts.long(3, 1), 2 * DRAWN_TOKENS, [], seed=1),
                live.lm.sample(live.contexts.long(4, 2), 1, [], seed=2),
            )
            return await in_order({"long": long, "short": short})

        return any(live.run(together())[0] == "short" for _ in range(3))

    async def _all_leave(self, live: Subject, prompts: Sequence[TokenIds], draws: bool) -> int:
        """Ask for all, and cancel all that are not answered when the first call ends."""
        lm, gone = live.lm, 0
        asked: list[asyncio.Future[Outcome]] = []

        def ask(i: int, ids: TokenIds) -> Coroutine[Any, Any, Outcome]:
            return (
                lm.sample(ids, DRAWN_TOKENS, [], seed=i) if draws else lm.next_token_logprobs(ids)
            )

        async def leave() -> None:
            nonlocal gone
            for one in asked:
                gone += not one.done()
                one.cancel()
            await submitted()

        async with live.after_each_call(leave):
            with live.gate.held():
                asked += await started(*(ask(i, ids) for i, ids in enumerate(prompts)))
            await live.all_done(asked)
        return gone

    @advise(
        "pins are counted, and clear_kv_cache gives back one of each prompt; keep pins in a set",
        "pinned_prefix",
        capability="pins",
    )
    def test_prompt_pinned_twice_is_cleared_once(self, live: Subject) -> None:
        """A prompt that is pinned several times and cleared once, over and over, can always be
        pinned, and its extensions have their cold rows: one clear releases repeated pins."""
        live.needs("genlm_cache_prefix")
        contexts = live.contexts
        room = min(live.longest, contexts.limit - 1)
        pins = cleared = 0
        for most, times in ((600, live.scaled(12, 4)), (5, live.scaled(20, 8))):
            length = min(most, room)
            prompt = contexts.long(length, 3)
            for _ in range(times):
                for _ in range(PINS_A_CLEAR):
                    try:
                        live.lm.cache_kv(prompt)
                    except Exception as error:
                        raise Violation(
                            f"a prompt of {length} tokens cannot be pinned any more, after {pins} "
                            f"pins and {cleared} calls of clear_kv_cache(), {PINS_A_CLEAR} pins of "
                            "one prompt before each: a clear must give back all pins of a prompt "
                            f"({error})"
                        ) from error
                    pins += 1
                live.check_row((*prompt, contexts.tokens[0]), how=f"pinned {PINS_A_CLEAR} times")
                live.model.clear()
                cleared += 1
            live.check_row((*prompt, contexts.tokens[0]), how="after its pins were cleared")

    @advise(
        "when memory is short, pinned state is evicted, old tokens are dropped, or a "
        "preempted request keeps half of its state",
        "pinned_contexts_are_moved_with_the_others",
        capability="pins",
    )
    def test_contexts_beside_as_many_pins_as_fit(self, live: Subject) -> None:
        """Prompts are pinned until the engine rejects one, or there are many. Then long contexts,
        extensions of these and of the pinned prompts, and samples and scores (at a low effort only
        if a pin was rejected) are right, or are rejected. If a pin was rejected, all of this is
        asked for again with fewer pins. After a clear nothing is rejected."""
        live.needs("genlm_cache_prefix")
        contexts = live.contexts
        room = min(live.longest, contexts.limit - 4)
        length = min(600, room)
        half = max(1, room // 2)
        prompts = [
            (contexts.plain[i % len(contexts.plain)], *contexts.long(length, i % 5)[1:])
            for i in range(live.scaled(64, 26))
        ]
        pinned = _pinned(live, prompts)
        is_full = len(pinned) < len(prompts)
        # At a low effort samples and scores are asked for only if some of them are preempted.
        asks_more = is_full or live.effort >= 1
        draws = self._draws(live, half) if asks_more else []
        texts = [contexts.long(room, 6 + i) for i in range(SCORES_TOGETHER)] if asks_more else []
        beside = f"beside {len(pinned)} pinned prompts of {length} tokens"
        rows: list[tuple[Outcome, TokenIds, str]] = []
        scores: list[tuple[Outcome, TokenIds, TokenIds]] = []
        drawn: list[Outcome] = []
        tails = [contexts.tokens[:1], contexts.tokens[2:4]][: 1 + is_full]
        for turn, tail in enumerate(tails):
            if turn:
                # With room for some of what is asked for together, the others are preempted.
                live.model.clear()
                pinned = pinned[: max(1, len(pinned) - math.ceil(2 * room / length))]
                for prompt in pinned:
                    live.lm.cache_kv(prompt)
            for variant in range(live.scaled(3, 2)):
                text = contexts.long(room, 6 + variant)
                for asked in (text, (*text, *tail)):
                    rows.append((*live.gather([asked]), asked, beside))
            for prompt in pinned[:: max(1, len(pinned) // 4)]:
                asked = (*prompt, *tail)
                rows.append((*live.gather([asked]), asked, f"extending one of them, {beside}"))
            in_steps = live.lm.supports("genlm_step", "scores")
            many = TOKENS_SCORED_IN_STEPS if in_steps else SCORED_TOKENS
            pairs = [(text[:half], text[half:][:many]) for text in texts if room > 1]
            given = live.run(_outcomes(*(draw() for draw in draws), *_scores(live, pairs)))
            drawn += given[: len(draws)]
            scores += [(s, *pair) for s, pair in zip(given[len(draws) :], pairs, strict=True)]
            live.lm.clear_cache()
        # There may be no room for cold rows beside pins, either.
        live.model.clear()
        for row, context, how in rows:
            # An exception says that there was no room: that is an honest answer.
            if not isinstance(row, Exception):
                live.expect.row(row, context, how=how)
        for score, prompt, scored in scores:
            if not isinstance(score, Exception):
                places = sorted({0, len(scored) // 2, len(scored) - 1})
                live.expect.scores(score, prompt, scored, places=places, how=beside)
        alone = live.run_all(draw() for draw in draws)
        moved = [
            f"{now} instead of {before}"
            for now, before in zip(drawn, alone * len(tails), strict=True)
            if not isinstance(now, Exception) and now != before
        ]
        # Rounding may move a few samples of a large vocabulary.
        is_small = len(live.lm.byte_vocab) <= SMALL_VOCABULARY_TOKENS
        few = 0 if is_small else len(drawn) // 4
        check(
            len(moved) <= few,
            f"{beside} and {SCORES_TOGETHER} scores, {len(moved)} of {len(drawn)} seeded draws "
            f"after {half} tokens differ from the same draws without pins; the first is "
            f"{''.join(moved[:1])}",
        )
        for context in (contexts.long(room, 6), *pinned[:1]):
            live.check_row(context, how=f"after {len(pinned)} pinned prompts were cleared")

    @advise(
        "the number of pins is limited, and a further pin replaces another one",
        "contexts_beside_as_many_pins_as_fit",
        capability="pins",
    )
    def test_many_short_prompts_are_pinned(self, live: Subject) -> None:
        """Dozens of short prompts are pinned, until the engine rejects one, and hundreds of other
        contexts are asked for. Then each pinned prompt, extended by a token, has its cold row."""
        live.needs("genlm_cache_prefix")
        count = live.scaled(48, 24)
        many = live.contexts.many(OTHER_CONTEXTS + count)
        prompts, others = many[:count], many[count:]
        pinned = _pinned(live, prompts)
        live.gather(others)
        extended = [(*prompt, live.contexts.tokens[2])[: live.contexts.limit] for prompt in pinned]
        how = f"extending one of {len(pinned)} pinned prompts, {len(others)} other contexts later"
        live.check_rows(extended, how=how)

    def _draws(self, live: Subject, half: int) -> list[Callable[[], Coroutine[Any, Any, Outcome]]]:
        """Samples that are made alone, and beside pins; none where rounding may change them."""
        if live.expect.atol > ROUNDING_ATOL:
            return []
        most = min(live.scaled(24, 16), live.contexts.limit - half)
        return [
            functools.partial(
                live.lm.sample, live.contexts.long(half, i), most, [], seed=i, **steady(live)
            )
            for i in range(SCORES_TOGETHER)
        ]

    @advise(
        "state is freed with its adapter and again by clear_kv_cache, so two contexts get the "
        "same memory",
        "adapters_are_bound_and_pinned_again_and_again",
        capability="pins",
    )
    def test_pins_end_with_their_adapter(self, live: Subject) -> None:
        """Prompts are pinned under an adapter, the adapter is removed, and all state is cleared.
        Then enough is asked for to reuse all memory: no two contexts share it."""
        live.needs("genlm_cache_prefix")
        name = live.needs_adapters()[0]
        contexts = live.contexts
        room = min(live.longest, contexts.limit - 1)
        for turn in range(2):
            live.model.bind(REBOUND_ADAPTER, name)
            for i in range(3):
                live.lm.cache_kv(contexts.long(min(100, room), i), lora_name=REBOUND_ADAPTER)
                live.lm.cache_kv(contexts.long(min(100, room), i))
                live.lm.cache_kv((*contexts.long(min(100, room), i), contexts.tokens[i]))
            live.model.remove(REBOUND_ADAPTER)
            if turn:
                live.lm.cache_kv(contexts.long(min(100, room), 1))
            live.model.clear()
        count, length = (30, 300) if live.effort >= 1 else (8, 600)
        how = "after pins of a removed adapter were cleared"
        for turn in range(2):
            many = [contexts.long(min(length, room), turn * count + i) for i in range(count)]
            live.check_rows(many, how=how)
            live.lm.clear_cache()
            for context in many[:: 1 if live.effort >= 1 else 3]:
                live.check_row((*context, contexts.tokens[turn]), how=f"extended, {how}")


def _pinned(live: Subject, prompts: Iterable[TokenIds]) -> list[TokenIds]:
    """Pin prompts until the engine rejects one with a message. Returns the pinned ones."""
    pinned: list[TokenIds] = []
    for prompt in prompts:
        try:
            live.lm.cache_kv(prompt)
        except Exception as error:
            check(
                bool(str(error)), f"a pin was rejected by {type(error).__name__}, without a message"
            )
            break
        pinned.append(prompt)
    return pinned


def _scores(
    live: Subject, pairs: Sequence[tuple[TokenIds, TokenIds]]
) -> list[Coroutine[Any, Any, Outcome]]:
    return [live.lm.sequence_logprobs(prompt, tokens) for prompt, tokens in pairs]


async def _outcomes(*asked: Coroutine[Any, Any, Outcome]) -> list[Outcome]:
    """The results of requests that are asked for together, with exceptions in their places."""
    return await asyncio.gather(*asked, return_exceptions=True)
