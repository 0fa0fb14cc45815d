"""Clauses on sampling and scoring: both agree with the rows."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from genlm.core.conformance.compare import TOP_FACTOR, check
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

#: Beyond it a change of the batch's shape may move a drawing point across a boundary between two
#: tokens.
ROUNDING = 1e-3

#: Draws for a comparison of frequencies, at effort 1.
DRAWS = 1000

SEEDS = st.integers(0, 1 << 32)


class SamplingClauses:
    """Draws come from the rows."""

    def test_seed_fixes_the_draw(self, live: Subject) -> None:
        """A seeded continuation is the same alone, again, gathered with others, and as the first of
        a batch."""
        live.needs_rounding_below(ROUNDING)

        def seed_fixes_the_draw(prompts: list[TokenIds], seed: int) -> None:
            alone = self._sample(live, prompts[0], seed=seed)
            check(
                self._sample(live, prompts[0], seed=seed) == alone,
                f"seed {seed} draws {alone}, then something else",
            )
            live.lm.clear_cache()
            first, *_ = live.run(live.lm.batch_sample(prompts, 4, [], seed=seed))
            check(
                first == alone,
                f"{list(prompts[0])} with seed {seed} draws {alone} alone and {first} first in a "
                "batch",
            )
            live.lm.clear_cache()
            last = live.run(live.lm.batch_sample([prompts[1], prompts[0]], 4, [], seed=seed))[1]
            again = live.run(live.lm.batch_sample([prompts[-1], prompts[0]], 4, [], seed=seed))[1]
            check(
                last == again,
                f"{list(prompts[0])} second in a batch with seed {seed} draws {last} or {again} "
                "beside others",
            )

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

    def test_temperature_zero_is_argmax(self, live: Subject) -> None:
        """At temperature 0 every token is a most likely one of its row (within the tolerance)."""

        def temperature_zero_is_argmax(prompt: TokenIds) -> None:
            self._expect_greedy(
                live, prompt, self._sample(live, prompt, temperature=0.0), "temperature=0"
            )

        live.check_all(temperature_zero_is_argmax, examples=10, prompt=live.contexts.any())

    def test_top_k_and_top_p(self, live: Subject) -> None:
        """``top_k=1`` and a tiny ``top_p`` leave the most likely token, ``top_k=5`` the five most
        likely."""

        def top_k_and_top_p(prompt: TokenIds, seed: int) -> None:
            self._expect_greedy(
                live, prompt, self._sample(live, prompt, seed=seed, top_k=1), "top_k=1"
            )
            self._expect_greedy(
                live, prompt, self._sample(live, prompt, seed=seed, top_p=1e-6), "top_p=1e-6"
            )
            (token_id,) = live.run(
                live.lm.sample(prompt, 1, [], temperature=100.0, seed=seed, top_k=5)
            )
            row = live.cold(prompt)
            least = float(row.topk(5).values[-1]) - TOP_FACTOR * live.atol
            check(
                float(row[token_id]) >= least,
                f"{list(prompt)} with top_k=5 drew token {token_id}, not one of the five",
            )

        live.check_all(top_k_and_top_p, examples=5, prompt=live.contexts.any(), seed=SEEDS)

    def test_stop_token_ends_the_draw(self, live: Subject) -> None:
        """A stop token ends the continuation and is not in it; a token that is not listed does not
        stop."""
        live.needs_rounding_below(ROUNDING)

        def stop_token_ends_the_draw(prompt: TokenIds, seed: int, place: int) -> None:
            free = self._sample(live, prompt, seed=seed)
            stop = free[place]
            stopped = live.run(live.lm.sample(prompt, 4, [stop], seed=seed))
            expected = free[: free.index(stop)]
            check(
                stopped == expected,
                f"{list(prompt)} with seed {seed} draws {free}, with stop token {stop} {stopped}",
            )

        live.check_all(
            stop_token_ends_the_draw,
            examples=10,
            prompt=live.contexts.any(),
            seed=SEEDS,
            place=st.integers(0, 3),
        )

    def test_max_tokens(self, live: Subject) -> None:
        """Without stop tokens a continuation has exactly ``max_tokens`` tokens; 0 gives none."""

        def max_tokens(prompt: TokenIds, count: int) -> None:
            drawn = live.run(live.lm.sample(prompt, count, [], seed=0))
            check(len(drawn) == count, f"max_tokens={count} gave {len(drawn)} tokens")
            vocab_size = len(live.lm.byte_vocab)
            check(
                all(0 <= token_id < vocab_size for token_id in drawn),
                f"{drawn} is not all in range({vocab_size})",
            )

        live.check_all(max_tokens, examples=10, prompt=live.contexts.any(), count=st.integers(0, 4))

    def test_frequencies_agree_with_rows(self, live: Subject) -> None:
        """The frequencies of drawn tokens are those of the cold row, at temperature 1 and others (a
        chi-squared test)."""
        prompt = live.contexts.stem[:6]
        count = max(200, round(DRAWS * live.effort))
        for temperature in (1.0, 0.5, 2.0):
            drawn = live.run(
                live.lm.batch_sample([prompt] * count, 1, [], temperature=temperature, seed=2026)
            )
            mass = (live.cold(prompt).double() / temperature).softmax(dim=0).cpu()
            # Tokens that are expected five times or more, a cell each, and one cell for all the
            # others.
            cells = [int(token_id) for token_id in (mass * count >= 5).nonzero().flatten()]
            observed = [sum(token_ids == [cell] for token_ids in drawn) for cell in cells]
            expected = [float(mass[cell]) * count for cell in cells]
            observed.append(count - sum(observed))
            expected.append(max(count - sum(expected), 1.0))
            chi2 = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
            limit = len(cells) + 8 * math.sqrt(2 * len(cells)) + 8
            check(
                chi2 <= limit,
                f"{count} draws after {list(prompt)} at temperature {temperature}: chi-squared "
                f"{chi2:.1f} with "
                f"{len(cells)} degrees of freedom",
            )

    def test_adapter_in_sampling(self, live: Subject) -> None:
        """A continuation is drawn with its adapter: greedy ones follow the adapter's rows."""
        names = [None, *live.needs_adapters()]

        def adapter_in_sampling(prompt: TokenIds) -> None:
            for name in names:
                drawn = live.run(live.lm.sample(prompt, 2, [], temperature=0.0, lora_name=name))
                self._expect_greedy(live, prompt, drawn, f"temperature=0, adapter {name!r}", name)

        live.check_all(adapter_in_sampling, examples=5, prompt=live.contexts.any())

    def test_scores_agree_with_rows(self, live: Subject) -> None:
        """``sequence_logprobs`` gives the entries of the cold rows, token by token, with each
        adapter."""
        names = [None, *(live.adapters if live.lm.supports("genlm_add_lora") else [])]

        def scores_agree_with_rows(prompt: TokenIds, tokens: TokenIds, name: str | None) -> None:
            scores = live.run(live.lm.sequence_logprobs(prompt, tokens, lora_name=name))
            check(
                tuple(scores.shape) == (len(tokens),),
                f"shape {tuple(scores.shape)} for {len(tokens)} tokens",
            )
            for i, token_id in enumerate(tokens):
                score, expected = (
                    float(scores[i]),
                    float(live.cold(prompt + tokens[:i], name)[token_id]),
                )
                near = score == expected or abs(score - expected) <= TOP_FACTOR * live.atol * max(
                    1.0, abs(expected)
                )
                check(
                    near,
                    f"{list(prompt)}, then {list(tokens)}: token {i} scores {score:.6g}, its row "
                    f"has {expected:.6g}",
                )

        live.check_all(
            scores_agree_with_rows,
            examples=10,
            prompt=live.contexts.any(),
            tokens=live.contexts.tails(),
            name=st.sampled_from(names),
        )

    def _sample(self, live: Subject, prompt: TokenIds, **options: float | None) -> list[int]:
        return live.run(live.lm.sample(prompt, 4, [], **options))  # type: ignore[arg-type]

    def _expect_greedy(
        self,
        live: Subject,
        prompt: TokenIds,
        drawn: list[int],
        how: str,
        adapter: str | None = None,
    ) -> None:
        for i, token_id in enumerate(drawn):
            row = live.cold((*prompt, *drawn[:i]), adapter)
            behind = float(row.max() - row[token_id])
            check(
                behind <= TOP_FACTOR * live.atol,
                f"{list(prompt)} with {how} draws {drawn}: token {token_id} is {behind:.3g} (log) "
                "behind the most likely",
            )
