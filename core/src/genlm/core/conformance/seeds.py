"""Clauses on seeds: a seed fixes a draw, and nothing else does."""

from __future__ import annotations

import asyncio
import math
from typing import Any

from hypothesis import strategies as st

from genlm.core.conformance.agreement import (
    ROUNDING,
    expect_same_draw,
    for_each_seed,
    probability_among,
    steady,
)
from genlm.core.conformance.compare import brief, check
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

SEEDS = st.integers(0, 1 << 32)


class SeedClauses:
    """A seed, or none."""

    def test_seed_fixes_the_draw(self, live: Subject) -> None:
        """A seeded continuation is the same alone, again, gathered with others, and as the first of
        a batch."""
        live.needs_rounding_below(ROUNDING)

        how = steady(live)

        def the_seed_fixes_it(prompts: list[TokenIds], seed: int) -> None:
            alone = live.run(live.lm.sample(prompts[0], 4, [], seed=seed, **how))
            expect_same_draw(
                live.run(live.lm.sample(prompts[0], 4, [], seed=seed, **how)),
                alone,
                f"seed {seed} draws {alone}, then something else",
            )
            live.lm.clear_cache()
            first, *_ = live.run(live.lm.batch_sample(prompts, 4, [], seed=seed, **how))
            expect_same_draw(
                first,
                alone,
                f"{list(prompts[0])} with seed {seed} draws {alone} alone and {first} first in a "
                "batch",
            )
            live.lm.clear_cache()
            last, again = (
                live.run(live.lm.batch_sample([other, prompts[0]], 4, [], seed=seed, **how))[1]
                for other in (prompts[1], prompts[-1])
            )
            expect_same_draw(
                last,
                again,
                f"{list(prompts[0])} second in a batch with seed {seed} draws {last} or {again} "
                "beside others",
            )

        def seed_fixes_the_draw(prompts: list[TokenIds], seed: int) -> None:
            for_each_seed(lambda seed: the_seed_fixes_it(prompts, seed), seed)

        live.check_all(
            seed_fixes_the_draw, examples=10, prompts=live.contexts.several(most=4), seed=SEEDS
        )

    def test_draws_are_separate(self, live: Subject) -> None:
        """Without a seed every draw is a draw of its own; with one every place in a batch has its
        own stream."""
        prompt = live.contexts.stem[:4]
        free = live.run(live.lm.batch_sample([prompt] * 4, 6, [], temperature=100.0))
        check(
            len(set(map(tuple, free))) > 1,
            f"four draws of six tokens at temperature 100 without a seed: all {free[0]}",
        )
        seeded = live.run(live.lm.batch_sample([prompt] * 4, 6, [], temperature=100.0, seed=1))
        check(
            len(set(map(tuple, seeded))) > 1,
            f"four places of a batch with seed 1 at temperature 100: all {seeded[0]}",
        )

    def test_seeds_among_companions(self, live: Subject) -> None:
        """A seeded draw is the same among draws with other options, other seeds, none, and other
        adapters."""
        live.needs_rounding_below(ROUNDING)
        name = next(iter(live.adapters), None) if live.lm.supports("genlm_add_lora") else None
        neighbours = st.sampled_from(
            [
                {"seed": None},
                {"seed": 3},
                {"top_k": 2, "seed": 5},
                {"top_p": 0.5},
                {"temperature": 0.0},
                {"temperature": 3.0, "seed": 1},
                {"lora_name": name},
            ]
        )

        how = steady(live)

        def it_is_the_same_among(
            prompt: TokenIds, seed: int, others: list[dict[str, Any]], place: int
        ) -> None:
            async def together() -> list[list[int]]:
                mine = live.lm.sample(prompt, 5, [], seed=seed, **how)
                draws = [live.lm.sample(prompt, 5, [], **other) for other in others]
                draws.insert(place % (len(draws) + 1), mine)
                return list(await asyncio.gather(*draws))

            alone = live.run(live.lm.sample(prompt, 5, [], seed=seed, **how))
            live.lm.clear_cache()
            drawn = live.run(together())[place % (len(others) + 1)]
            expect_same_draw(
                drawn,
                alone,
                f"{brief(prompt)} with seed {seed} draws {alone} alone, and {drawn} beside "
                f"{others}",
            )

        def seeds_among_companions(
            prompt: TokenIds, seed: int, others: list[dict[str, Any]], place: int
        ) -> None:
            for_each_seed(lambda seed: it_is_the_same_among(prompt, seed, others, place), seed)

        live.check_all(
            seeds_among_companions,
            examples=15,
            least=8,
            prompt=live.contexts.any(room_for=5),
            seed=SEEDS,
            others=st.lists(neighbours, min_size=1, max_size=5),
            place=st.integers(0, 5),
        )

    def test_successive_tokens_are_independent(self, live: Subject) -> None:
        """Draws of two tokens, with seeds one after the other: all pairs come at the frequencies
        that the rows give them."""
        prompt = live.contexts.stem[:5]
        count = live.scaled(400, 200)
        expected: dict[tuple[int, ...], float] = {}
        first = live.cold(prompt)
        for token_id in first.topk(2).indices.tolist():
            second = live.cold((*prompt, token_id))
            for next_id in second.topk(2).indices.tolist():
                p = probability_among(first, 2, token_id) * probability_among(second, 2, next_id)
                expected[token_id, next_id] = p

        async def together() -> list[list[int]]:
            draws = [live.lm.sample(prompt, 2, [], seed=i, top_k=2) for i in range(count)]
            return list(await asyncio.gather(*draws))

        drawn = [tuple(ids) for ids in live.run(together())]
        strange = [ids for ids in drawn if ids not in expected]
        check(len(strange) <= count // 50, f"with top_k=2 some draws are {strange[:3]}")
        keys = list(expected)
        chi2 = sum(
            (drawn.count(key) - count * expected[key]) ** 2 / max(1.0, count * expected[key])
            for key in keys
        )
        check(
            chi2 <= len(keys) + 8 * math.sqrt(2 * len(keys)) + 8,
            f"{count} draws of two tokens after {brief(prompt)}, with seeds from 0: the pairs come "
            f"{[drawn.count(key) for key in keys]} times, "
            f"{[round(count * expected[key]) for key in keys]} are expected",
        )

    def test_unseeded_after_seeded(self, live: Subject) -> None:
        """A seed fixes one draw, and none of those without a seed that follow."""
        prompt = live.contexts.stem[:4]
        length = min(24, live.contexts.limit - 5)
        free = []
        for _ in range(2):
            live.run(live.lm.sample(prompt, 4, [], seed=11))
            free.append(live.run(live.lm.sample(prompt, length, [], temperature=100.0)))
        check(free[0] != free[1], f"after a seeded draw, unseeded ones repeat: {free[0]}")
