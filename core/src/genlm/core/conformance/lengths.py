"""Clauses on lengths: from one token to ``max_context``, around the sizes at which engines change
what they do."""

from __future__ import annotations

import asyncio

import pytest

from genlm.core.conformance.compare import TOP_FACTOR, check, shown
from genlm.core.conformance.contexts import EDGES
from genlm.core.conformance.subject import Subject
from genlm.core.types import TokenIds

#: A prompt of this many tokens is computed in chunks by most engines.
CHUNK = 256


class LengthClauses:
    """An answer is right at every length."""

    window: int | None = None

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
        """Another token at any place gives another row, in the cold rows too. (Set ``window`` where
        the model forgets what is further back.)"""
        contexts = live.contexts
        most = min(live.longest, self.window or live.longest)
        for length in {min(length, most) for length in (8, 40, 100, 200, most)}:
            text = contexts.long(length)
            row = live.cold(text)
            places = {0, 1, length // 2, length - 2, length - 1}
            for place in sorted(place for place in places if 0 <= place < length):
                other = next(token for token in contexts.tokens if token != text[place])
                changed = (*text[:place], other, *text[place + 1 :])
                check(
                    not live.cold(changed).equal(row),
                    f"the row of a context of {length} tokens is the same with token {other} "
                    f"instead of {text[place]} at position {place}",
                )
        rows: dict[bytes, int] = {}
        for token_id in contexts.spread:
            key = live.cold((*contexts.stem[:3], token_id)).cpu().numpy().tobytes()
            other = rows.setdefault(key, token_id)
            check(other == token_id, f"tokens {other} and {token_id} at the end give the same row")

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
        row = live.cold(context)
        (drawn,) = live.run(live.lm.sample(context, 1, [], temperature=0.0))
        behind = float(row.max() - row[drawn])
        check(behind <= TOP_FACTOR * live.atol, f"the draw after {limit} tokens is not the argmax")
        drawn_to_the_end = live.run(live.lm.sample(context[:-3], 4, [], seed=0))
        check(
            len(drawn_to_the_end) == 4,
            f"4 tokens fit after {limit - 3}; {len(drawn_to_the_end)} were drawn",
        )
        self._expect_scores(live, context[:-2], (*tokens[:2], tokens[0]), range(3))

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
            for i, token_id in enumerate(drawn):
                row = live.cold((*prompt, *drawn[:i]))
                behind = float(row.max() - row[token_id])
                check(
                    behind <= TOP_FACTOR * live.atol,
                    f"{shown(prompt)} with temperature=0 draws {drawn}: token {token_id} is "
                    f"{behind:.3g} (log) behind the most likely",
                )

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
        for turn in range(live.scaled(3, 2)):
            order = source.sample(cases, len(cases))

            async def together(order: list[tuple[TokenIds, TokenIds]] = order) -> list[object]:
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
                given = scores[i] if scores is not None else None
                self._expect_scores(live, prompt, tokens, near, given)
                if turn == 1:
                    live.expect(live.ask(prompt), prompt, how="after a continuation was scored")
            live.lm.clear_cache()

    def _expect_scores(
        self,
        live: Subject,
        prompt: TokenIds,
        tokens: TokenIds,
        places: object,
        scores: object = None,
    ) -> None:
        given = (
            scores if scores is not None else live.run(live.lm.sequence_logprobs(prompt, tokens))
        )
        check(
            tuple(given.shape) == (len(tokens),),  # type: ignore[attr-defined]
            f"shape {tuple(given.shape)} for {len(tokens)} tokens",  # type: ignore[attr-defined]
        )
        for i in places:  # type: ignore[attr-defined]
            score = float(given[i])  # type: ignore[index]
            expected = float(live.cold((*prompt, *tokens[:i]))[tokens[i]])
            far = abs(score - expected) if score != expected else 0.0
            check(
                far <= TOP_FACTOR * live.atol * max(1.0, abs(expected)),
                f"{shown(prompt)}, then {shown(tokens)}: token {i} scores {score:.6g}, its row "
                f"has {expected:.6g}",
            )
