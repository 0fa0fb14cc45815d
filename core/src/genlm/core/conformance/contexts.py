"""Hypothesis strategies for contexts."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from genlm.core.types import TokenIds

#: The lengths of the stems that contexts share: none, less than a block of a paged cache, more than
#: one, more than two.
STEMS = (0, 3, 18, 37)

#: What contexts are made of where the tokenizer has words. On tokens that make no text some models
#: amplify rounding: the rows of SmolLM2-135M, one context evaluated beside another, then differ by
#: 1e-3 in float32, and on text by 3e-6.
TEXT = (
    "The quick brown fox jumps over the lazy dog while an old man reads to his daughter a letter "
    "about the weather in "
    "their city, and nobody else in the room listens to them, since it is late and all of the "
    "guests have gone home."
)


def words(tokenizer: Any, vocab_size: int) -> list[int]:
    """The token ids of :data:`TEXT`; none where the tokenizer has no words, or an ``encode`` of its
    own kind."""
    try:
        ids = [int(token_id) for token_id in tokenizer.encode(TEXT)]
    except (AttributeError, TypeError, ValueError):
        return []
    has_words = max(STEMS) <= len(ids) < 2 * len(TEXT.split())
    return ids if has_words and all(0 <= token_id < vocab_size for token_id in ids) else []


class Contexts:
    """Contexts over few tokens, so that prefixes and tails coincide often, some behind a long
    shared stem.

    Args:
        tokenizer: That of the model.
        vocab_size: Token ids are below it.
        max_context: The longest context, in tokens.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, max_context: int | None) -> None:
        self.limit = max_context if max_context is not None else 1 << 30
        text = words(tokenizer, vocab_size)
        #: The few tokens.
        self.tokens = list(dict.fromkeys(text[8:]))[:6] or [
            vocab_size * i // 7 for i in range(1, 7)
        ]
        #: What long contexts begin with.
        self.stem = tuple(
            text or (vocab_size * (7 + 13 * i) // 601 % vocab_size for i in range(max(STEMS)))
        )

    def any(self, room_for: int = 4) -> SearchStrategy[TokenIds]:
        """One context that leaves room for that many tokens to follow."""
        longest = min(5, self.limit - room_for)
        tails = st.lists(st.sampled_from(self.tokens), min_size=1, max_size=longest)
        stems = st.sampled_from(
            [length for length in STEMS if length + longest + room_for <= self.limit]
        )

        @st.composite
        # A composite, because Hypothesis would show a `map` as a call of it.
        def contexts(draw: st.DrawFn) -> TokenIds:
            return (*self.stem[: draw(stems)], *draw(tails))

        return contexts()

    def several(self, least: int = 2, most: int = 6) -> SearchStrategy[list[TokenIds]]:
        """Some contexts, perhaps with duplicates."""
        return st.lists(self.any(), min_size=least, max_size=most)

    def distinct(self, least: int = 2, most: int = 4) -> SearchStrategy[list[TokenIds]]:
        """Some contexts without duplicates."""
        return st.lists(self.any(), min_size=least, max_size=most, unique=True)

    def tails(self, least: int = 1, most: int = 3) -> SearchStrategy[TokenIds]:
        """A few tokens to follow a context."""
        tokens = st.lists(st.sampled_from(self.tokens), min_size=least, max_size=most)

        @st.composite
        def tails(draw: st.DrawFn) -> TokenIds:
            return tuple(draw(tokens))

        return tails()
