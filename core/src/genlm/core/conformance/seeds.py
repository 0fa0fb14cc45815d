"""Clauses on seeds: a seed fixes a draw, and nothing else does."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from genlm.core.conformance.agreement import (
    expect_frequencies,
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
        live.needs_little_rounding()

        how = steady(live)

        @live.for_all(examples=10, prompts=live.contexts.several(most=4), seed=SEEDS)
        @for_each_seed
        def seed_fixes_the_draw(prompts: list[TokenIds], seed: int) -> None:
            what = f"{list(prompts[0])} with seed {seed} draws"
            alone = live.sample(prompts[0], 4, seed=seed, **how)
            again = live.sample(prompts[0], 4, seed=seed, **how)
            expect_same_draw(again, alone, f"{what} {alone}, then {again}")
            live.lm.clear_cache()
            first, *_ = live.run(live.lm.batch_sample(prompts, 4, [], seed=seed, **how))
            expect_same_draw(first, alone, f"{what} {alone} alone and {first} first in a batch")
            live.lm.clear_cache()
            last, again = (
                live.run(live.lm.batch_sample([other, prompts[0]], 4, [], seed=seed, **how))[1]
                for other in (prompts[1], prompts[-1])
            )
            beside = f"{last} or {again} second in a batch, beside others"
            expect_same_draw(last, again, f"{what} {beside}")

    def test_draws_are_separate(self, live: Subject) -> None:
        """Without a seed every draw is a draw of its own; with one every place in a batch has its
        own stream."""
        prompt = live.contexts.stem[:4]
        for seed in (None, 1):
            draws = live.lm.batch_sample([prompt] * 4, 6, [], temperature=100.0, seed=seed)
            drawn = live.run(draws)
            check(
                len(set(map(tuple, drawn))) > 1,
                f"four draws of six tokens in a batch at temperature 100, seed={seed}: all "
                f"{drawn[0]}",
            )

    def test_seeds_among_companions(self, live: Subject) -> None:
        """A seeded draw is the same among draws with other options, other seeds, none, and other
        adapters."""
        live.needs_little_rounding()
        name = next(iter(live.loras), None)
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

        @live.for_all(
            examples=15,
            least=8,
            prompt=live.contexts.any(room_for=5),
            seed=SEEDS,
            others=st.lists(neighbours, min_size=1, max_size=5),
            place=st.integers(0, 5),
        )
        @for_each_seed
        def seeds_among_companions(
            prompt: TokenIds, seed: int, others: list[dict[str, Any]], place: int
        ) -> None:
            alone = live.sample(prompt, 5, seed=seed, **how)
            live.lm.clear_cache()
            place %= len(others) + 1
            given = [*others[:place], {"seed": seed, **how}, *others[place:]]
            draws = live.run_all(live.lm.sample(prompt, 5, [], **options) for options in given)
            drawn = draws[place]
            expect_same_draw(
                drawn,
                alone,
                f"{brief(prompt)} with seed {seed} draws {alone} alone, and {drawn} beside "
                f"{others}",
            )

    def test_successive_tokens_are_independent(self, live: Subject) -> None:
        """Draws of two tokens, with seeds one after the other: all pairs come at the frequencies
        that the rows give them."""
        prompt = live.contexts.stem[:5]
        count = live.scaled(400, 200)
        mass: dict[tuple[int, ...], float] = {}
        first = live.cold(prompt)
        for token_id in first.topk(2).indices.tolist():
            second = live.cold((*prompt, token_id))
            for next_id in second.topk(2).indices.tolist():
                p = probability_among(first, 2, token_id) * probability_among(second, 2, next_id)
                mass[token_id, next_id] = p
        draws = [live.lm.sample(prompt, 2, [], seed=i, top_k=2) for i in range(count)]
        drawn = [tuple(ids) for ids in live.run_all(draws)]
        strange = [ids for ids in drawn if ids not in mass]
        check(len(strange) <= count // 50, f"with top_k=2 some draws are {strange[:3]}")
        what = f"{count} draws of two tokens after {brief(prompt)}, with seeds from 0"
        expect_frequencies(what, [ids for ids in drawn if ids in mass], mass)

    def test_unseeded_after_seeded(self, live: Subject) -> None:
        """A seed fixes one draw, and none of those without a seed that follow."""
        prompt = live.contexts.stem[:4]
        length = min(24, live.contexts.limit - 5)
        free = []
        for _ in range(2):
            live.sample(prompt, 4, seed=11)
            free.append(live.sample(prompt, length, temperature=100.0))
        check(free[0] != free[1], f"after a seeded draw, unseeded ones repeat: {free[0]}")
