"""Clauses on lengths: from one token to ``max_context``, around the sizes at which engines change
what they do."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from genlm.core.conformance.agreement import expect_greedy, expect_scores
from genlm.core.conformance.compare import check
from genlm.core.conformance.contexts import EDGES
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

if TYPE_CHECKING:
    import torch

#: A prompt of this many tokens is computed in chunks by most engines.
CHUNK = 256


class LengthClauses:
    """An answer is right at every length."""

    window: int | None
    ignores_tokens: bool

    def test_rows_at_every_length(self, live: Subject) -> None:
        """Contexts of every length around powers of two have their cold rows: one after the other,
        longest and shortest in turn, forked, and all in one batch, some with another first
        token."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        lengths = contexts.lengths(most)
        order = live.random("lengths").sample(lengths, len(lengths))
        for length in [most, *order]:
            live.expect(live.ask(text[:length]), text[:length], how="after others of its prefixes")
        # Growing by a token across every edge, from what was kept.
        for length in (length for length in lengths if length + 1 in lengths):
            for end in (length, length + 1):
                fork = (*contexts.long(most, 1)[: end - 1], contexts.tokens[2])
                live.expect(live.ask(fork), fork, how="growing token by token")
        live.lm.clear_cache()
        # What forks from the longest one, early and late.
        for length in lengths[:: 1 if live.effort >= 1 else 3]:
            live.ask(text)
            fork = (*text[: length - 1], contexts.tokens[3], contexts.tokens[4])[:most]
            live.expect(live.ask(fork), fork, how=f"forked from a context of {most} tokens")
            live.lm.clear_cache()
        together = [text[:length] for length in lengths]
        # Beside them contexts that differ from them in their first token only.
        other = next(token for token in contexts.tokens if token != text[0])
        together += [(other, *context[1:]) for context in together[1::3]]
        for row, context in zip(live.gather(together), together, strict=True):
            live.expect(row, context, how="in a batch of contexts of all lengths")

    def test_row_depends_on_every_token(self, live: Subject) -> None:
        """Another token at any place gives another row, and so does another order of distant
        tokens, in the cold rows too. (Set ``window`` where the model forgets what is further back,
        ``ignores_tokens`` where it need not look at all.)"""
        if self.ignores_tokens:
            pytest.skip("this class says that the model may ignore tokens (ignores_tokens)")
        contexts = live.contexts
        most = min(live.longest, self.window or live.longest)
        for length in sorted({min(length, most) for length in (8, 40, 100, 200, 600, most)}):
            text = contexts.long(length)
            row = live.cold(text)
            for place in sorted({0, 1, length // 2, length - 2, length - 1} & set(range(length))):
                other = next(token for token in contexts.tokens if token != text[place])
                changed = (*text[:place], other, *text[place + 1 :])
                what = f"with token {other} instead of {text[place]} at position {place}"
                self._expect_another(live, changed, row, what)
            for one, other in (
                (1, length // 2),
                (length // 2, length - 4),
                (length - 9, length - 3),
            ):
                other = next((i for i in range(other, 0, -1) if text[i] != text[one]), other)
                if 0 < one < other:
                    changed = (*text[:one], text[other], *text[one + 1 :])
                    changed = (*changed[:other], text[one], *changed[other + 1 :])
                    what = f"with the tokens at positions {one} and {other} exchanged"
                    self._expect_another(live, changed, row, what)
        rows: dict[bytes, int] = {}
        for token_id in contexts.spread:
            key = live.cold((*contexts.stem[:3], token_id)).cpu().numpy().tobytes()
            other = rows.setdefault(key, token_id)
            check(other == token_id, f"tokens {other} and {token_id} at the end give the same row")

    def _expect_another(
        self, live: Subject, changed: TokenIds, row: torch.Tensor, what: str
    ) -> None:
        check(
            not live.cold(changed).equal(row),
            f"the row of a context of {len(changed)} tokens is the same {what}. If the model "
            "forgets what is further back, say so by `window` (--window); if it may ignore tokens, "
            "as a back-off model does, by `ignores_tokens` (--ignores-tokens)",
        )

    def test_tokens_from_all_over_the_vocabulary(self, live: Subject) -> None:
        """Special tokens, the first and the last ones: gathered, extended and asked again, their
        contexts have their cold rows."""
        contexts = live.contexts
        last = len(live.lm.byte_vocab) - 1
        tokens = list(dict.fromkeys([0, last, *contexts.special[:6], *contexts.spread]))
        asked = [(*contexts.stem[:4], token_id) for token_id in tokens]
        asked += [(token_id, contexts.tokens[0]) for token_id in tokens]
        asked = [context for context in asked if len(context) <= contexts.limit]
        # Unusual tokens amplify rounding in some models.
        atol, live.atol = live.atol, 10 * live.atol
        try:
            for _ in range(2):
                for row, context in zip(live.gather(asked), asked, strict=True):
                    live.expect(row, context, how="gathered with other unusual tokens")
                live.lm.clear_cache()
        finally:
            live.atol = atol

    def test_longest_context(self, live: Subject) -> None:
        """A context of exactly ``max_context`` tokens has a row, a draw and a score; run only where
        that is at most 1024 tokens, or as many as the engine can bear."""
        limit = live.lm.max_context
        if limit is None or limit > live.longest:
            pytest.skip(
                f"max_context is {limit}; to have it run, set it to {live.longest - 1} or less "
                "where the backend lets you (for instance by --option max_context=64)"
            )
        context = live.contexts.long(limit)
        tokens = live.contexts.tokens
        for shorter in (context[:-1], context):
            live.expect(live.ask(shorter), shorter, how=f"where max_context is {limit}")
        expect_greedy(live, live.run(live.lm.sample(context, 1, [], temperature=0.0)), context)
        drawn_to_the_end = live.run(live.lm.sample(context[:-3], 4, [], seed=0))
        check(
            len(drawn_to_the_end) == 4,
            f"4 tokens fit after {limit - 3}; {len(drawn_to_the_end)} were drawn",
        )
        three = (*tokens[:2], tokens[0])
        scores = live.run(live.lm.sequence_logprobs(context[:-2], three))
        expect_scores(live, scores, context[:-2], three)

    def test_draws_at_every_length(self, live: Subject) -> None:
        """Draws whose prompts end just before the edges, together: every token is the most likely
        one of its cold row, below, at and above the edge."""
        text = live.contexts.long(live.longest, 4)
        edges = [edge for edge in EDGES if edge + 2 <= live.longest]
        prompts = [text[: edge - 2] for edge in edges[:: 1 if live.effort >= 1 else 2]]

        async def together() -> list[list[int]]:
            draws = [live.lm.sample(prompt, 4, [], temperature=0.0) for prompt in prompts]
            return list(await asyncio.gather(*draws))

        for prompt, drawn in zip(prompts, live.run(together()), strict=True):
            expect_greedy(live, drawn, prompt)

    def test_scores_at_every_length(self, live: Subject) -> None:
        """Continuations of unequal lengths score what the cold rows say, across blocks, chunks and
        every edge, in any order, warm and cold."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        cases = [
            (text[:begin], text[begin:end])
            for begin, end in (
                (1, 20),
                (14, 18),
                (14, 40),
                (30, 34),
                (32, 36),
                (64, 67),
                (33, 70),
                (60, 68),
                (126, 132),
                *((edge - 4, edge + 8) for edge in EDGES if edge >= CHUNK),
            )
            if end <= most
        ]
        source = live.random("scores")

        def alone(prompt: TokenIds, tokens: TokenIds) -> torch.Tensor:
            return live.run(live.lm.sequence_logprobs(prompt, tokens))

        for turn in range(live.scaled(3, 2)):
            order = source.sample(cases, len(cases))

            async def together(
                order: list[tuple[TokenIds, TokenIds]] = order,
            ) -> list[torch.Tensor]:
                return list(
                    await asyncio.gather(*(live.lm.sequence_logprobs(*case) for case in order))
                )

            scores = live.run(together()) if turn != 1 else None
            for i, (prompt, tokens) in enumerate(order):
                begin = len(prompt)
                near = [
                    k
                    for k in range(len(tokens))
                    if k in (0, 1, len(tokens) - 1) or (begin + k) % 16 in (0, 1, 15)
                ]
                given = scores[i] if scores is not None else alone(prompt, tokens)
                expect_scores(live, given, prompt, tokens, places=near)
                if turn == 1:
                    live.expect(live.ask(prompt), prompt, how="after a continuation was scored")
            live.lm.clear_cache()
