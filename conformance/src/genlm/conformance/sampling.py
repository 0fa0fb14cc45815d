"""Clauses on sampling and scoring: both agree with the rows; a seed fixes a sample, and nothing
else does."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytest
from hypothesis import strategies as st

from genlm.conformance.advice import advise
from genlm.conformance.agreement import (
    expect_frequencies,
    expect_same_draw,
    for_each_seed,
    single_tokens,
    steady,
)
from genlm.conformance.compare import TOP_FACTOR, Violation, brief, check, with_options
from genlm.conformance.properties import for_all
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: How many samples are made to compare frequencies, at effort 1.
FREQUENCY_DRAWS = 1000

SEEDS = st.integers(0, 1 << 32)

#: How many times some samples are made until a stop token comes up in one of them.
STOP_TRIES = 5


class SamplingClauses:
    """Samples come from the rows, by a seed or none."""

    @advise(
        "one generator for a whole batch, a seed that depends on the position in the batch, "
        "or seed=0 taken for no seed",
        "draws_are_separate",
        capability="seeds",
    )
    def test_seed_fixes_the_draw(self, live: Subject) -> None:
        """A seeded continuation is the same alone, repeated, gathered with others, and as the first
        of a batch; 0 is a valid seed."""
        live.needs_little_rounding()

        how = steady(live)
        prompt = live.contexts.stem[:4]
        one, two = (live.sample(prompt, 12, seed=0, temperature=2.0, **how) for _ in range(2))
        expect_same_draw(one, two, f"{list(prompt)} with seed 0 draws {one}, and then {two}")

        @for_all(live, examples=10, prompts=live.contexts.several(most=4), seed=SEEDS)
        @for_each_seed
        def seed_fixes_the_draw(prompts: list[TokenIds], seed: int) -> None:
            what = f"{list(prompts[0])} with seed {seed} draws"
            alone = live.sample(prompts[0], 4, seed=seed, **how)
            again = live.sample(prompts[0], 4, seed=seed, **how)
            expect_same_draw(again, alone, f"{what} {alone}, and then {again}")
            live.lm.clear_cache()
            first, *_ = live.samples(prompts, 4, seed=seed, **how)
            expect_same_draw(
                first, alone, f"{what} {alone} alone, and {first} as the first of a batch"
            )
            live.lm.clear_cache()
            last, again = (
                live.samples([other, prompts[0]], 4, seed=seed, **how)[1]
                for other in (prompts[1], prompts[-1])
            )
            beside = f"{last} as the second of a batch, and {again} behind another first one"
            expect_same_draw(last, again, f"{what} {beside}")

    @advise(
        "all positions of a batch share one random stream, or unseeded draws take no fresh entropy",
        "seed_fixes_the_draw",
    )
    def test_draws_are_separate(self, live: Subject) -> None:
        """Without a seed, all samples of a batch are independent; with a seed, each position in a
        batch has its own random stream."""
        prompt = live.contexts.stem[:4]
        for seed in (None, 1):
            drawn = live.samples([prompt] * 4, 6, temperature=100.0, seed=seed)
            what = f"four draws of six tokens in a batch at temperature 100, seed={seed}"
            check(len(set(map(tuple, drawn))) > 1, f"{what}, are all equal: {drawn[0]}")

    @advise(
        "each token's generator is seeded again, with similar seeds",
        "long_draws_do_not_repeat",
    )
    def test_successive_tokens_are_independent(self, live: Subject) -> None:
        """In two-token samples with consecutive seeds, all pairs of tokens have the frequencies
        that the rows give."""
        prompt = live.contexts.stem[:5]
        count = live.scaled(400, 200)
        mass: dict[tuple[int, ...], float] = {
            (token_id, next_id): p * q
            for token_id, p in _two_of(live.cold(prompt))
            for next_id, q in _two_of(live.cold((*prompt, token_id)))
        }
        draws = [live.lm.sample(prompt, 2, [], seed=i, top_k=2) for i in range(count)]
        drawn = [tuple(ids) for ids in live.run_all(draws)]
        strange = [ids for ids in drawn if ids not in mass]
        what = f"{count} draws of two tokens after {brief(prompt)}, with seeds from 0 and top_k=2"
        check(
            len(strange) <= count // 50,
            f"{what}: {len(strange)} have other tokens than the two most likely, such as "
            f"{strange[:3]}",
        )
        expect_frequencies(what, [ids for ids in drawn if ids in mass], mass)

    @advise(
        "a seed sets a generator that other draws take numbers from",
        "seeded_draw_sets_no_generator",
    )
    def test_unseeded_after_seeded(self, live: Subject) -> None:
        """A seed affects only its own sample, not unseeded samples that follow it or run beside
        it."""
        prompt = live.contexts.stem[:4]
        length = min(12, live.contexts.limit - 5)
        free = []
        for _ in range(2):
            live.sample(prompt, 4, seed=11)
            free.append(live.sample(prompt, length, temperature=100.0))
        check(
            free[0] != free[1],
            f"two unseeded draws, each after a draw with seed 11, are equal: {free[0]}",
        )
        for _ in range(2):
            beside = [
                live.lm.sample(prompt, length, [], seed=seed, temperature=100.0)
                for seed in (11, None, None)
            ]
            free += live.run_all(beside)[1:]
        check(
            len(set(map(tuple, free))) == len(free),
            "unseeded draws after and beside draws with seed 11 are equal: "
            f"{list(map(brief, free))}",
        )

    @advise(
        "temperature=0 is treated as a low temperature, or draft tokens are accepted without "
        "a check",
        "tiny_temperature_is_greedy",
    )
    def test_temperature_zero_is_argmax(self, live: Subject) -> None:
        """At temperature 0 every token is a most likely one of its row (within the tolerance)."""

        @for_all(live, examples=10, prompt=live.contexts.any())
        def temperature_zero_is_argmax(prompt: TokenIds) -> None:
            live.expect.greedy(live.sample(prompt, 4, temperature=0.0), prompt)

    @advise(
        "an option is not passed on, or a tiny top_p becomes 0 in half precision",
        "options_together",
    )
    def test_top_k_and_top_p(self, live: Subject) -> None:
        """``top_k=1`` and a tiny ``top_p`` leave the most likely token, ``top_k=5`` the five most
        likely."""

        @for_all(live, examples=5, prompt=live.contexts.any(), seed=SEEDS)
        def top_k_and_top_p(prompt: TokenIds, seed: int) -> None:
            for how in ({"top_k": 1}, {"top_p": 1e-6}):
                drawn = live.sample(prompt, 4, seed=seed, **how)
                live.expect.greedy(drawn, prompt, how=with_options(how).strip())
            (token_id,) = live.sample(prompt, 1, temperature=100.0, seed=seed, top_k=5)
            row = live.cold(prompt)
            least = float(row.topk(5).values[-1]) - TOP_FACTOR * live.expect.atol
            check(
                float(row[token_id]) >= least,
                f"{list(prompt)} with top_k=5 draws token {token_id}, which is not one of the five "
                "most likely",
            )

    @advise(
        "a stop token's id is tested for truth, or looked up in a table that is one entry too "
        "short",
        "every_token_stops",
        "options_together",
    )
    def test_first_and_last_token_stop(self, live: Subject) -> None:
        """The first and the last token of the vocabulary work as stop tokens: at a temperature at
        which they are drawn, no sample contains its stop token."""
        size = live.contexts.vocab_size
        length = min(24, live.contexts.limit - 5)
        count = math.ceil(3 * size / length)
        if count > 120:
            pytest.skip(f"of {size} tokens one comes up too seldom")
        prompts = [live.contexts.stem[:4]] * count
        stops = [0, size - 1]
        # By chance no sample stops, one time in 20.
        for _ in range(STOP_TRIES):
            batches = [
                live.lm.batch_sample(prompts, length, [stop], temperature=1000.0) for stop in stops
            ]
            for stop, drawn in zip(tuple(stops), live.run_all(batches), strict=True):
                check(
                    not any(stop in ids for ids in drawn),
                    f"draws after {brief(prompts[0])} with the stop token {stop} contain it",
                )
                # By chance they are equal less often than one time in a million.
                check(
                    len(set(map(tuple, drawn))) > 1 or (len(drawn) - 1) * len(drawn[0]) < 8,
                    f"{len(drawn)} draws after {brief(prompts[0])} with the stop token {stop} are "
                    f"all equal, {brief(drawn[0])}: one draw answers all requests, or they have "
                    "the top_k or temperature of another request",
                )
                if any(len(ids) < length for ids in drawn):
                    stops.remove(stop)
        if not stops:
            return
        free = live.run(live.lm.batch_sample(prompts * 2, length, [], temperature=1000.0))
        never = f"token {stops[0]} stopped none of {STOP_TRIES * count} draws of {length} tokens"
        never += " at temperature 1000"
        check(
            not any(stops[0] in ids for ids in free),
            f"{never}, and comes up in draws without stop tokens",
        )
        raise Violation(
            f"{never}, nor does it come up in {len(free)} draws without stop tokens: draws are not "
            "from the whole row; they may have the top_k, top_p or temperature of other requests"
        )

    @advise("a block of random numbers is reused", "successive_tokens_are_independent")
    def test_long_draws_do_not_repeat(self, live: Subject) -> None:
        """The random numbers of one sample are independent: at a temperature at which all tokens
        are about equally likely, tokens do not repeat at any distance."""
        prompt = live.contexts.stem[:4]
        room = min(live.longest, live.contexts.limit - len(prompt))
        asked = [(None, min(live.scaled(150, 75), room)), (5, min(150, room))]
        batches = [
            live.lm.batch_sample([prompt] * 4, length, [], temperature=1000.0, seed=seed)
            for seed, length in asked
        ]
        for (seed, length), drawn in zip(asked, live.run_all(batches), strict=True):
            for lag in range(1, length - 7):
                pairs = [pair for ids in drawn for pair in zip(ids, ids[lag:], strict=False)]
                same = sum(one == other for one, other in pairs)
                check(
                    same <= max(8, len(pairs) / 3),
                    f"of {len(drawn)} draws of {length} tokens at temperature 1000, seed={seed}, "
                    f"{same} of {len(pairs)} tokens are equal to the token {lag} places before; at "
                    "most a third may be",
                )

    @advise("the count includes the stop token or the prompt's last token", "draws_of_full_length")
    def test_max_tokens(self, live: Subject) -> None:
        """Without stop tokens a continuation has exactly ``max_tokens`` tokens; 0 gives none."""

        @for_all(live, examples=10, prompt=live.contexts.any(), count=st.integers(0, 4))
        def max_tokens(prompt: TokenIds, count: int) -> None:
            drawn = live.sample(prompt, count, seed=0)
            check(len(drawn) == count, f"a draw with max_tokens={count} has {len(drawn)} tokens")
            known = range(live.contexts.vocab_size)
            check(
                all(token_id in known for token_id in drawn),
                f"a draw has token ids outside {known}: {drawn}",
            )

    @advise(
        "draws use other logits than the rows, or the temperature is applied twice or clamped",
        "options_together",
        "large_temperature_is_flat",
    )
    def test_frequencies_agree_with_rows(self, live: Subject) -> None:
        """The frequencies of drawn tokens are those of the cold row, at temperature 1 and others (a
        chi-squared test)."""
        prompt = live.contexts.stem[:6]
        count = max(200, round(FREQUENCY_DRAWS * live.effort))
        for temperature in (1.0, 0.5, 2.0):
            drawn = live.samples([prompt] * count, 1, temperature=temperature, seed=2026)
            mass = (live.cold(prompt).double() / temperature).softmax(dim=0)
            what = f"{count} draws after {list(prompt)} at temperature {temperature}"
            expect_frequencies(what, drawn, single_tokens(mass))

    @advise(
        "the filters do not run in the order temperature, top_k, top_p, or a request gets "
        "another request's options",
        "frequencies_agree_with_rows",
    )
    def test_options_together(self, live: Subject) -> None:
        """Filters apply in the order temperature, ``top_k``, ``top_p`` of the remaining mass: only
        the remaining tokens are drawn, at the right frequencies."""
        prompt = live.contexts.stem[:6]
        row = live.cold(prompt)
        count = live.scaled(400, 150)
        # On rows that are not very peaked, filters in a wrong order leave other tokens.
        for temperature, top_k, top_p in (
            (0.6, None, 0.7),
            (2.0, 12, 0.5),
            (1.5, 6, 0.8),
            (3.0, None, 0.3),
            (1.0, 8, None),
            (0.02, None, None),
        ):
            options = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
            drawn = live.samples([prompt] * count, 1, seed=7, **options)
            mass, unsure = _left(row, temperature, top_k, top_p, live.expect.atol)
            what = f"{count} draws after {brief(prompt)}{with_options(options)}"
            for ids in drawn:
                is_left = len(ids) == 1 and (bool(mass[ids[0]] > 0) or ids[0] in unsure)
                check(is_left, f"{what}: one is {ids}, which these options exclude")
            # Rounding decides whether the unsure tokens are left, so only the others are compared.
            sure = mass.clone()
            sure[list(unsure)] = 0.0
            if unsure and not bool(sure.any()):
                continue
            among = [ids for ids in drawn if ids[0] not in unsure]
            check(
                bool(among) or float(sure.sum()) < 0.1,
                f"{what}: none is among the tokens that these options leave",
            )
            if among:
                expect_frequencies(what, among, single_tokens(sure / sure.sum()))

    @advise("only a few stop tokens are stored", "every_token_stops", capability="seeds")
    def test_several_stop_tokens(self, live: Subject) -> None:
        """With several stop tokens, the first one that is drawn ends the sample; stop tokens that
        are never drawn have no effect."""
        live.needs_little_rounding()

        how = {**steady(live), "temperature": 1.5}

        @for_all(
            live,
            examples=10,
            prompt=live.contexts.any(room_for=6),
            seed=SEEDS,
            places=st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True),
        )
        @for_each_seed
        def several_stop_tokens(prompt: TokenIds, seed: int, places: list[int]) -> None:
            free = live.sample(prompt, 6, seed=seed, **how)
            stops = {free[place] for place in places}
            others = [token for token in live.contexts.plain[:40] if token not in free][:3]
            stopped = live.sample(prompt, 6, [*others, *stops], seed=seed, **how)
            first = min(free.index(stop) for stop in stops)
            found = (
                f"{brief(prompt)} with seed {seed} draws {free}; with the stop tokens "
                f"{sorted({*stops, *others})} it draws {stopped} instead of {free[:first]}"
            )
            expect_same_draw(stopped, free[:first], found)

    @advise(
        "the model's own end-of-sequence token ends a draw although it is not listed", "max_tokens"
    )
    def test_draws_of_full_length(self, live: Subject) -> None:
        """Without stop tokens, samples have their full length, at a temperature at which every
        token is drawn."""
        count = live.scaled(200, 60)
        prompts = [live.contexts.stem[:n] for n in (2, 4, 5)] * (count // 3)
        length = min(16, live.contexts.limit - 5)
        for ids in live.samples(prompts, length, temperature=100.0):
            check(
                len(ids) == length,
                f"a draw of {length} tokens without stop tokens ends after {len(ids)}: only "
                "`stop_token_ids` stop, and not the model's own end-of-sequence token",
            )

    @advise(
        "steps after the first are computed without the adapter, or a draw's state is kept "
        "without it",
        "adapters_in_turn",
    )
    def test_adapter_in_sampling(self, live: Subject) -> None:
        """A continuation is drawn under its adapter: greedy samples follow the adapter's rows, and
        leave no state that is used for another adapter."""
        names = [None, *live.needs_adapters()]

        @for_all(live, examples=5, prompt=live.contexts.any())
        def adapter_in_sampling(prompt: TokenIds) -> None:
            for name in names:
                drawn = live.sample(prompt, 2, temperature=0.0, lora_name=name)
                live.expect.greedy(drawn, prompt, name)

        prompt = live.contexts.long(min(60, live.contexts.limit - 8), 4)
        for name in reversed(names):
            drawn = live.sample(prompt, 8, temperature=0.0, lora_name=name)
            how = f"of which {name or 'the base model'!r} drew the last tokens"
            for other in names:
                ends = range(1, len(drawn) + 1) if other != name else [len(drawn)]
                contexts = [(*prompt, *drawn[:end]) for end in ends]
                live.check_rows(contexts, [other] * len(contexts), how=how)


def _left(
    row: torch.Tensor, temperature: float, top_k: int | None, top_p: float | None, atol: float
) -> tuple[torch.Tensor, set[int]]:
    """The masses that temperature, then ``top_k``, then ``top_p`` leave of a row; and the tokens
    whose place inside or outside the cut depends on rounding."""
    import torch

    mass = (row.double().cpu() / temperature).softmax(0)
    order = mass.argsort(descending=True, stable=True)
    kept = order[:top_k]
    unsure: set[int] = set()
    if top_k is not None and top_k < len(order):
        gap = float(mass[order[top_k - 1]] - mass[order[top_k]])
        unsure |= {int(order[top_k - 1]), int(order[top_k])} if gap <= 4 * atol else set()
    if top_p is not None:
        cumulative = mass[kept].cumsum(0) / mass[kept].sum()
        end = int((cumulative < top_p).sum())
        for i in (end - 1, end):
            if 0 <= i < len(kept) and abs(float(cumulative[i]) - top_p) <= 20 * atol:
                unsure |= {int(t) for t in kept[max(0, i - 1) : i + 3]}
        kept = kept[: end + 1]
    left = torch.zeros_like(mass)
    left[kept] = mass[kept]
    return left / left.sum(), unsure


def _two_of(row: torch.Tensor) -> Iterable[tuple[int, float]]:
    """The two most likely tokens, with their shares of what both have."""
    top = row.double().topk(2)
    return zip(top.indices.tolist(), top.values.softmax(0).tolist(), strict=True)
