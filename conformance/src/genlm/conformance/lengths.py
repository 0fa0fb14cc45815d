"""Clauses on the lengths of contexts and continuations: around the sizes at which engines change
what they do."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest

from genlm.conformance.advice import advise
from genlm.conformance.compare import ROUNDING_ATOL, Violation, brief, check
from genlm.conformance.contexts import EDGES
from genlm.conformance.subject import Subject
from genlm.core.types import TokenIds

#: Most engines compute a prompt of this many tokens in chunks.
CHUNK_TOKENS = 256

#: The longest context that is tried, and the seconds of a row after which no longer one is tried.
MAX_TOKENS, BEARABLE_SECONDS = 8192, 0.5

#: The first and last places of short continuations, within blocks and across them.
SHORT_CONTINUATIONS = (
    (1, 20), (14, 18), (14, 40), (30, 34), (32, 36), (64, 67), (33, 70), (60, 68), (126, 132),
)  # fmt: skip

#: The places of long continuations around which tokens are compared.
COMPARED_EDGES = (16, 64, 100, 128, 256, 512)


class LengthClauses:
    """An answer is right at every length."""

    @advise(
        "an error at the end of a block, chunk, window or position table; the right lengths "
        "show which",
        "contexts_grow_across_every_length",
        "last_chunk_of_one_token",
    )
    def test_rows_at_every_length(self, live: Subject) -> None:
        """Contexts of every length around powers of two have their cold rows, asked one after the
        other."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        lengths = contexts.lengths(most)
        order = live.random("lengths").sample(lengths, len(lengths))
        wrong: dict[int, Violation] = {}
        for length in [most, *order]:
            try:
                live.check_row(text[:length], how="after prefixes and extensions of it")
            except Violation as violation:
                wrong.setdefault(length, violation)
        if wrong:
            right = [length for length in lengths if length not in wrong]
            raise Violation(
                f"{wrong[min(wrong)]}\n  wrong at lengths {sorted(wrong)}; right at {right}"
            )

    @advise(
        "a new block or chunk starts at a wrong position, or without the token before it",
        "extended_context",
    )
    def test_contexts_grow_across_every_length(self, live: Subject) -> None:
        """A context that grows by a token across a power of two starts from kept state, and has its
        cold row."""
        contexts, most = live.contexts, live.longest
        lengths = contexts.lengths(most)
        text = contexts.long(most, 1)
        for length in (length for length in lengths if length + 1 in lengths):
            for context in (text[:length], (*text[:length], contexts.tokens[2])):
                live.check_row(context, how="as it grows token by token")

    @advise(
        "a block is shared although only a part of it is equal",
        "forked_contexts",
        "chunks_in_another_order",
    )
    def test_forks_at_every_length(self, live: Subject) -> None:
        """Contexts that fork from a long context, near its beginning or near its end, have their
        cold rows."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        for length in contexts.lengths(most)[:: 1 if live.effort >= 1 else 3]:
            live.ask(text)
            fork = (*text[: length - 1], contexts.tokens[3], contexts.tokens[4])[:most]
            live.check_row(fork, how=f"forked from a context of {most} tokens")
            live.lm.clear_cache()

    @advise("another kernel or dtype is used beyond some length")
    def test_rows_are_as_precise_at_every_length(self, live: Subject) -> None:
        """Cold rows of long contexts have as many different values as those of short contexts, so
        none is computed in a narrower type."""
        if live.expect.atol > ROUNDING_ATOL:
            pytest.skip(f"the rows are rounded (atol={live.expect.atol:g}); run it in float32")
        text = live.contexts.long(live.longest)
        lengths = live.contexts.lengths(live.longest)
        values = {length: len({*live.cold(text[:length]).tolist()}) for length in lengths}
        finest = max(values, key=values.__getitem__)
        coarse = min((n for n in lengths if n >= finest), key=values.__getitem__)
        # A model that counts n-grams has few values, and more of them in longer contexts.
        counts = values[finest] < len(live.lm.byte_vocab) / 2
        check(
            counts or values[coarse] > 0.95 * values[finest],
            f"the row of {coarse} tokens has {values[coarse]} different values, that of {finest} "
            f"has {values[finest]}: it is computed in another precision",
        )

    @advise("padding, or the mask of a batch of unequal lengths", "large_batch")
    def test_all_lengths_in_one_batch(self, live: Subject) -> None:
        """Contexts of all lengths in one batch, some of them with another first token, have their
        cold rows."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        together = [text[:length] for length in contexts.lengths(most)]
        other = next(token for token in contexts.tokens if token != text[0])
        together += [(other, *context[1:]) for context in together[1::3]]
        live.ask(text)  # Some contexts begin with the state that is kept of it.
        live.lm.clear_cache()
        live.check_rows(together, how="in a batch of contexts of all lengths")

    @advise(
        "the model's window or its position table ends before the context, or a token is cut off",
        "padding_is_not_known_by_its_value",
        "last_chunk_of_one_token",
    )
    def test_row_depends_on_every_token(self, live: Subject) -> None:
        """Changing any token, or exchanging distant tokens, changes the cold row. (Set ``window``
        if the model forgets older tokens, ``ignores_tokens`` if rows need not depend on all
        tokens.)"""
        most = self._looks_back(live)
        for length in sorted({min(length, most) for length in (8, 40, 100, 200, 600, most)}):
            text = live.contexts.long(length)
            for at in sorted({0, 1, length // 2, length - 2, length - 1} & set(range(length))):
                other = next(token for token in live.contexts.tokens if token != text[at])
                what = f"with token {other} instead of {text[at]} at position {at}"
                self._expect_another(live, text, {at: other}, what)
            for at, to in ((1, length // 2), (length // 2, length - 4), (length - 9, length - 3)):
                to = next((i for i in range(to, 0, -1) if text[i] != text[at]), to)
                if 0 < at < to:
                    what = f"with the tokens at positions {at} and {to} exchanged"
                    self._expect_another(live, text, {at: text[to], to: text[at]}, what)

    @advise("the embedding has fewer entries than the tokenizer, and ids are clamped")
    def test_every_token_has_a_row_of_its_own(self, live: Subject) -> None:
        """Tokens from all over the vocabulary at the end of a context give different cold rows."""
        self._looks_back(live)
        contexts = live.contexts
        rows: dict[bytes, int] = {}
        for token_id in contexts.spread:
            key = live.cold((*contexts.stem[:3], token_id)).cpu().numpy().tobytes()
            other = rows.setdefault(key, token_id)
            check(
                other == token_id,
                f"contexts that end in token {other} and in token {token_id} have the same row",
            )

    @advise(
        "padding is found by a token's id instead of by lengths, or the tokenizer's first token "
        "is put before contexts"
    )
    def test_padding_is_not_known_by_its_value(self, live: Subject) -> None:
        """A special token added at either end changes the cold row: no token is taken for padding,
        and none is put before a text."""
        most = self._looks_back(live)
        contexts = live.contexts
        text = contexts.stem[:3]
        for mark in contexts.marks if most >= 5 else ():
            for longer in ((mark, *text), (*text, mark)):
                again = (*longer, mark) if longer[0] == text[0] else (mark, *longer)
                same = [live.cold(each).equal(live.cold(longer)) for each in (text, again)]
                check(
                    not any(same),
                    f"the row of {brief(longer)} is the same with one token {mark} "
                    f"{'less' if same[0] else 'more'}",
                )

    @advise("a chunk of one token is taken for padding or left out", "rows_at_every_length")
    def test_last_chunk_of_one_token(self, live: Subject) -> None:
        """If a context is one token longer than a whole number of chunks, its row depends on that
        last token."""
        most = self._looks_back(live)
        for size in (48, 64, 100, 192):
            for chunks in range(1, 5 if live.effort >= 1 else 3):
                length = chunks * size + 1
                if length <= most:
                    text = live.contexts.long(length)
                    other = next(token for token in live.contexts.tokens if token != text[-1])
                    what = "with another last token"
                    self._expect_another(live, text, {length - 1: other}, what)

    def _looks_back(self, live: Subject) -> int:
        """How many tokens back the model looks; skip the clause where it need not look at all."""
        if live.suite.ignores_tokens:
            pytest.skip("this class says that the model may ignore tokens (ignores_tokens)")
        return min(live.longest, live.suite.window or live.longest)

    def _expect_another(
        self, live: Subject, text: TokenIds, changes: dict[int, int], what: str
    ) -> None:
        changed = tuple(changes.get(place, token) for place, token in enumerate(text))
        check(
            not live.cold(changed).equal(live.cold(text)),
            f"the row of a context of {len(text)} tokens is the same {what}. If the model "
            "forgets what is further back, say so by `window` (--window); if it may ignore "
            "tokens, as a back-off model does, by `ignores_tokens` (--ignores-tokens)",
        )

    @advise("the key of kept state leaves out tokens or their order", "chunks_in_another_order")
    def test_contexts_that_differ_in_one_token(self, live: Subject) -> None:
        """Contexts that differ in one token anywhere, or in the order of the first two, have their
        cold rows, one after the other and together."""
        contexts = live.contexts
        most = min(live.longest, contexts.limit)
        for length in sorted({min(length, most) for length in (40, 64, 130, 300)}):
            text = contexts.long(length)
            places = range(0, length, max(1, length // live.scaled(8, 4)))
            near = {text: "asked for", (*text[1::-1], *text[2:]): "with its first tokens exchanged"}
            for at in places:
                other = next(token for token in contexts.tokens if token != text[at])
                near[(*text[:at], other, *text[at + 1 :])] = f"with token {at} changed to {other}"
            for context, how in near.items():
                live.check_row(context, how=f"{how}, after others like it")
            live.model.clear()
            live.check_rows([*near], how="together with others that differ in one token")

    @advise(
        "a block is identified by its own tokens only, without the tokens before it",
        "chunks_in_another_order",
    )
    def test_equal_ends_behind_different_beginnings(self, live: Subject) -> None:
        """Contexts that contain the same tokens at the same position after other tokens, or at
        another position, have their own rows."""
        contexts = live.contexts
        most = min(live.longest, contexts.limit)
        for size in (16, 32, 64, 100):
            end = contexts.long(size, 1)
            first, second = contexts.long(size, 2), contexts.long(size, 3)
            if 2 * size <= most:
                live.model.clear()
                for context in (first + end, second, second + end, first + end):
                    live.check_row(
                        context, how="after contexts with the same end and another beginning"
                    )

    @advise(
        "special tokens or the last ids are treated differently, for instance as padding",
        "padding_is_not_known_by_its_value",
    )
    def test_tokens_from_all_over_the_vocabulary(self, live: Subject) -> None:
        """Contexts with special tokens and the first and last ids have their cold rows: gathered,
        extended and asked for again."""
        contexts = live.contexts
        last = contexts.vocab_size - 1
        tokens = list(dict.fromkeys([0, last, *contexts.special[:6], *contexts.spread]))
        asked = [(*contexts.stem[:4], token_id) for token_id in tokens]
        asked += [(token_id, contexts.tokens[0]) for token_id in tokens]
        asked = [context for context in asked if len(context) <= contexts.limit]
        # In some models unusual tokens amplify rounding.
        atol, live.expect.atol = live.expect.atol, 10 * live.expect.atol
        try:
            for _ in range(2):
                live.check_rows(asked, how="gathered with other unusual tokens")
                live.lm.clear_cache()
        finally:
            live.expect.atol = atol

    @advise(
        "positions, a kernel or a table change beyond some length",
        "rows_at_every_length",
        capability="long contexts",
    )
    def test_contexts_twice_as_long_each_time(self, live: Subject) -> None:
        """If ``max_context`` is very long, contexts of doubling lengths have their rows, extended
        and cold, until a row takes longer than half a second."""
        contexts, limit, length = live.contexts, live.contexts.limit, live.longest
        seconds = 0.0 if live.suite.longest is None else math.inf
        most = min(limit, MAX_TOKENS if live.effort >= 1 else MAX_TOKENS // 2)
        while length < most and seconds <= BEARABLE_SECONDS:
            length = min(2 * (length - length % 2), most)
            text = contexts.long(length, 1)
            live.ask(text[:-2])
            began = time.perf_counter()
            live.cold(text)
            seconds = time.perf_counter() - began
            live.check_row(text, how="extending a context that is two tokens shorter")
            live.looked = length

    @advise(
        "max_context is one token too large, or draws or scores end before it",
        "contexts_twice_as_long_each_time",
        capability="long contexts",
    )
    def test_longest_context(self, live: Subject) -> None:
        """A context of exactly ``max_context`` tokens has a row that depends on its first token,
        and samples and scores work up to that length."""
        contexts, limit, length = live.contexts, live.contexts.limit, live.looked or live.longest
        if length < limit:
            pytest.skip(
                f"rows of {length} tokens were looked at, and max_context is {live.lm.max_context};"
                " to have the rest run, set it lower where the backend lets you (for instance by "
                "--option max_context=64)"
            )
        context, tokens = contexts.long(limit), contexts.tokens
        for shorter in (context[:-1], context):
            live.check_row(shorter, how=f"where max_context is {limit}")
        if not live.suite.ignores_tokens and (live.suite.window or limit) >= limit:
            first = next(token for token in tokens if token != context[0])
            check(
                not live.cold((first, *context[1:])).equal(live.cold(context)),
                f"the row of a context of max_context={limit} tokens does not depend on its first "
                "token",
            )
        live.expect.greedy(live.sample(context, 1, temperature=0.0), context)
        drawn = live.sample(context[:-3], 4, seed=0)
        check(
            len(drawn) == 4,
            f"a draw of 4 tokens after {limit - 3} has {len(drawn)}, although max_context is "
            f"{limit}",
        )
        three = (*tokens[:2], tokens[0])
        live.expect.scores(live.score(context[:-2], three), context[:-2], three)

    @advise(
        "a drawn token that begins a block does not see the one before it",
        "contexts_grow_across_every_length",
    )
    def test_draws_at_every_length(self, live: Subject) -> None:
        """In samples whose prompts end just before block and chunk sizes, made together, every
        token is the most likely token of its cold row, on both sides of the edge."""
        text = live.contexts.long(live.longest, 4)
        edges = [edge for edge in EDGES if edge + 2 <= live.longest]
        prompts = [text[: edge - 2] for edge in edges[:: 1 if live.effort >= 1 else 2]]
        draws = [live.lm.sample(prompt, 4, [], temperature=0.0) for prompt in prompts]
        for prompt, drawn in zip(prompts, live.run_all(draws), strict=True):
            live.expect.greedy(drawn, prompt)

    @advise(
        "scores are shared by continuation or by tokens only, or computed without their adapter",
        "scores_at_every_length",
    )
    def test_scores_together(self, live: Subject) -> None:
        """Scores that are asked for together, with rows and samples of their prompts, and that
        share a continuation, a prompt or all tokens, with adapters and without, are the same as
        alone."""
        lm, contexts, names = live.lm, live.contexts, [None, *live.loras][:3]
        prompts = [contexts.long(min(n, contexts.limit - 3), n) for n in (2, 3, 17)]
        tails = [tuple(contexts.tokens[begin:end]) for begin, end in ((0, 2), (2, 5), (3, 5))]
        asked = [(prompt, tail, name) for prompt in prompts for tail in tails for name in names]
        # The same tokens are asked for with more of them scored.
        asked += [(text[:1], (*text[1:], *tail), None) for text in prompts[1:] for tail in tails]
        texts = [*prompts, *((*prompt, *tail[:-1]) for prompt in prompts for tail in tails)]
        greedy: Any = {"max_tokens": 2, "eos_token_ids": [], "temperature": 0.0}

        async def together() -> list[Any]:
            scores = [lm.sequence_logprobs(*each) for each in asked]
            rows = [lm.next_token_logprobs(text) for text in texts]
            draws = [lm.sample(prompt, **greedy) for prompt in prompts]
            return await asyncio.gather(*scores, *rows, *draws)

        scores = live.run(together())
        draws, rows = [[scores.pop() for _ in some][::-1] for some in (prompts, texts)]
        for given, (prompt, tail, name) in zip(scores, asked, strict=True):
            live.expect.scores(
                given, prompt, tail, name, how="asked for together with others like it"
            )
        live.expect.rows(
            rows, texts, how="asked for together with scores of its tokens, or after it"
        )
        for drawn, prompt in zip(draws, prompts, strict=True):
            live.expect.greedy(drawn, prompt, how="together with scores, with temperature=0")
        hook = "genlm_step" if lm.supports("genlm_step", "scores") else "genlm_sequence_logprobs"
        padded = live.model.ids > len(lm.byte_vocab)
        if padded and lm.supports(hook) and not lm.supports(hook, "width"):
            pytest.skip(
                "scores were made from rows, since the model has more ids than the tokenizer; to "
                "have the engine's own looked at, give a model with as many, or take the hook's "
                "argument width"
            )

    @advise(
        "at the start of a chunk or of kept state, a score is read from the neighbouring row",
        "scores_together",
    )
    def test_scores_at_every_length(self, live: Subject) -> None:
        """Scores of continuations of unequal lengths agree with the cold rows across all block and
        chunk sizes, in any order, warm and cold."""
        contexts, most = live.contexts, live.longest
        text = contexts.long(most)
        cases = [
            (text[:begin], text[begin:end])
            for begin, end in (
                *SHORT_CONTINUATIONS,
                *((edge - 4, edge + 8) for edge in EDGES if edge >= CHUNK_TOKENS),
                # One token has a block for itself.
                *((edge, edge + 1) for edge in EDGES),
            )
            if end <= most
        ]
        source = live.random("scores")
        for turn in range(live.scaled(3, 2)):
            order = source.sample(cases, len(cases))
            together = [] if turn == 1 else [live.lm.sequence_logprobs(*case) for case in order]
            scores = live.run_all(together)
            for i, (prompt, tokens) in enumerate(order):
                last = len(tokens) - 1
                near = {k for k in range(last) if (len(prompt) + k) % 16 in (0, 1, 15)}
                given = scores[i] if scores else live.score(prompt, tokens)
                live.expect.scores(
                    given, prompt, tokens, places=sorted({0, min(1, last), *near, last})
                )
                if turn == 1:
                    live.check_row(prompt, how="after a continuation was scored")
            live.lm.clear_cache()


class ContinuationClauses:
    """Continuations of hundreds of tokens."""

    @advise(
        "a buffer for drawn or scored tokens is full, or the token before a stop token is lost",
        "several_stop_tokens",
    )
    def test_long_continuations(self, live: Subject) -> None:
        """Scores of continuations of up to 500 tokens agree with the cold rows. Drawn continuations
        of that length have all their tokens, each the most likely one, and contexts can be extended
        from them."""
        contexts = live.contexts
        room = min(live.longest, contexts.limit - 1)
        for cut, n in ((3, min(500, room - 40)), (40, min(150, room - 40))):
            if n < 2:
                continue
            text = contexts.long(cut + n, cut)
            prompt, tokens = text[:cut], text[cut:]
            scores, places = live.score(prompt, tokens), _around(n)
            live.expect.scores(scores, prompt, tokens, places=places, how="a long continuation")
            for longer in (text[:-1], text):
                after = (*longer, contexts.tokens[1])
                live.check_row(after, how="extending scored tokens")
        # An engine may return None for the longest sample only, so a shorter one comes before it.
        drawn: list[int] = []
        for n, stops in ((96, False), (live.scaled(200, 140), False), (21, True)):
            prompt = contexts.long(min(9, contexts.limit - 2), 2)
            most = min(n, live.longest, contexts.limit - len(prompt) - 1)
            drawn = drawn[:most] if stops else live.sample(prompt, most, temperature=0.0)
            check(len(drawn) == most, f"a draw of {most} tokens has {len(drawn)}")
            # The stop token is the last drawn one, which may come earlier, too.
            if stops:
                stop = drawn[-1]
                expected = drawn[: drawn.index(stop)]
                drawn = live.sample(prompt, most, [stop], temperature=0.0)
                check(
                    drawn == expected,
                    f"a draw with the stop token {stop} is {drawn}, not {expected}, the tokens "
                    "before it in the same draw without stop tokens",
                )
            live.expect.greedy(drawn, prompt, places=_around(len(drawn)))
            for end in (len(drawn), len(drawn) - 1):
                context = (*prompt, *drawn[: max(end, 0)])
                for asked in ((*context, contexts.tokens[3]), context):
                    live.check_row(asked, how="extending drawn tokens")


def _around(length: int) -> list[int]:
    around = {edge + off for edge in COMPARED_EDGES for off in (-1, 0, 1)}
    return sorted(place for place in {0, 1, *around, length - 1} if 0 <= place < length)
