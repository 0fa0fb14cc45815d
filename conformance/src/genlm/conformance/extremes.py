"""Clauses on samples with extreme options: each means what its formula says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.agreement import expect_same_draw, for_each_seed, steady
from genlm.conformance.compare import brief, check
from genlm.conformance.properties import for_all
from genlm.conformance.sampling import SEEDS
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: Temperatures that are as good as 0. The square of the second is 0 in float32, and logits divided
#: by it overflow in float16.
TINY_TEMPERATURES = (1e-6, 1e-30)

#: How many samples of one token are repeated with that token as a stop token.
STOPPED_DRAWS = 300

#: How many stop tokens a sample has at most.
MAX_STOP_TOKENS = 300


class ExtremeClauses:
    """The ends of what the options may be."""

    @advise(
        "rows are divided by the temperature in float16 or float32, which gives infinities; "
        "take the likeliest token below 1e-5",
        "temperature_zero_is_argmax",
        capability="extremes",
    )
    def test_tiny_temperature_is_greedy(self, live: Subject) -> None:
        """Temperatures of 1e-6 and 1e-30 take the most likely token, and raise nothing."""

        @for_all(live, examples=4, prompt=live.contexts.any())
        def tiny_temperature_is_greedy(prompt: TokenIds) -> None:
            for temperature in TINY_TEMPERATURES:
                drawn = live.sample(prompt, 3, temperature=temperature, seed=1)
                live.expect.greedy(drawn, prompt, how=f"with temperature={temperature:g}")

    @advise(
        "torch.topk is called with k above the vocabulary's size; use min(top_k, vocabulary)",
        "top_k_and_top_p",
        capability="extremes",
    )
    def test_top_k_beyond_the_vocabulary(self, live: Subject) -> None:
        """A ``top_k`` of at least the vocabulary's size has no effect: a seeded sample is the same
        with it and without."""
        live.needs_little_rounding()
        size = len(live.lm.byte_vocab)

        @for_all(live, examples=3, prompt=live.contexts.any(), seed=SEEDS)
        @for_each_seed
        def top_k_beyond_the_vocabulary(prompt: TokenIds, seed: int) -> None:
            free = live.sample(prompt, 4, seed=seed)
            for top_k in (size, size + 1, 100 * size):
                drawn = live.sample(prompt, 4, seed=seed, top_k=top_k)
                expect_same_draw(
                    drawn,
                    free,
                    f"{brief(prompt)} with seed {seed} and top_k={top_k} of {size} tokens draws "
                    f"{drawn}, without top_k {free}",
                )

    @advise("temperatures are clamped", "frequencies_agree_with_rows", capability="extremes")
    def test_large_temperature_is_flat(self, live: Subject) -> None:
        """At a temperature of 1e6 all tokens are about equally likely: samples come from the whole
        vocabulary, and the most likely tokens are drawn no more often than others."""
        prompt = live.contexts.stem[:4]
        size = live.contexts.vocab_size
        count = live.scaled(400, 200)
        drawn = live.samples([prompt] * count, 1, temperature=1e6)
        row = live.cold(prompt)[:size]
        likely = set(row.topk(size // 4).indices.tolist())
        among = sum(ids[0] in likely for ids in drawn)
        expected = count * len(likely) / max(1, size)
        check(
            abs(among - expected) <= 6 * (count * 0.1875) ** 0.5,
            f"of {count} draws after {brief(prompt)} at temperature 1e6, {among} are of the most "
            f"likely quarter of the vocabulary, where {expected:.0f} are expected",
        )

    @advise(
        "the list of stop tokens is truncated, or some ids are left out",
        "several_stop_tokens",
        "first_and_last_token_stop",
        capability="extremes",
    )
    def test_every_token_stops(self, live: Subject) -> None:
        """If a sample begins with a token, the same sample with that token as a stop token is
        empty, also if it is one of hundreds of stop tokens."""
        live.needs_little_rounding()
        contexts, how = live.contexts, {**steady(live), "temperature": 1000.0}
        prompt = contexts.stem[:4]
        numbers = range(live.scaled(STOPPED_DRAWS, STOPPED_DRAWS // 3))
        first = live.run_all(live.lm.sample(prompt, 1, [], seed=n, **how) for n in numbers)
        tokens = {n: ids[0] for n, ids in zip(numbers, first, strict=True) if ids}
        many = contexts.plain[:: max(1, len(contexts.plain) // MAX_STOP_TOKENS)]

        def with_stops(others: Sequence[int], only: list[int]) -> list[int]:
            """The seeds of samples that go on although their first token is a stop token."""
            stopped = live.run_all(
                live.lm.sample(prompt, 1, [*others, tokens[n]], seed=n, **how) for n in only
            )
            return [n for n, ids in zip(only, stopped, strict=True) if ids]

        for others, what in (((), "it"), (many, f"it and {len(many)} others")):
            wrong = with_stops(others, [*tokens])
            # Rounding moves few samples, and other ones each time.
            if len(wrong) > 1 + len(tokens) // 50 or (wrong and with_stops(others, wrong)):
                n = wrong[0]
                check(
                    False,
                    f"{brief(prompt)} with seed {n} draws token {tokens[n]}; with {what} as stop "
                    f"tokens the draw is not empty. This happens in {len(wrong)} of {len(tokens)} "
                    f"draws, with the tokens {sorted({tokens[n] for n in wrong})[:12]}",
                )

    @advise(
        "a long list of stop tokens is ignored or truncated",
        "every_token_stops",
        capability="extremes",
    )
    def test_all_tokens_but_one_stop(self, live: Subject) -> None:
        """With all tokens but one as stop tokens, a sample consists of that token only, repeated as
        often as it is drawn before another."""
        contexts = live.contexts
        prompt, size = contexts.stem[:4], len(live.lm.byte_vocab)
        if size > 1 << 17:
            pytest.skip(f"{size} stop tokens are many; give a model with a smaller vocabulary")
        for only in (int(live.cold(prompt).argmax()), contexts.plain[-1]):
            stops = [token for token in range(size) if token != only]
            for temperature, count in ((0.0, 1), (1.0, 40), (1000.0, 40)):
                draws = (
                    live.lm.sample(prompt, 3, stops, temperature=temperature) for _ in range(count)
                )
                drawn = live.run_all(draws)
                strange = [ids for ids in drawn if {*ids} - {only}]
                check(
                    not strange,
                    f"{brief(prompt)} with all tokens but {only} as stop tokens draws "
                    f"{strange[:1]}",
                )
                if temperature == 0.0:
                    row = live.cold(prompt)
                    likeliest = float(row.max() - row[only]) == 0.0
                    check(
                        bool(drawn[0]) == likeliest,
                        f"{brief(prompt)} with all tokens but {only} as stop tokens and "
                        f"temperature=0 draws {drawn[0]}; the most likely token is "
                        f"{int(row.argmax())}",
                    )
