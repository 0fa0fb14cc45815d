"""The space that examples come from: lengths, batch sizes, token ids, and what contexts share.

Engines change what they do at certain sizes: at the end of a block of a paged cache, of a chunk of
a prompt, of a window, of a captured graph, of a micro-batch. So there are two kinds of contexts.

*Short ones*, for properties that Hypothesis shrinks: few tokens, so that prefixes and tails
coincide often, some behind a stem that they share.

*Long ones*, for the clauses on lengths, batches and histories: from one token to ``max_context``,
with lengths just below, at and just above each of :data:`EDGES`. How long depends on what the
engine can bear: see :attr:`~genlm.conformance.subject.Subject.longest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from genlm.core.types import TokenIds

#: The lengths of the stems that contexts share: none, less than a block of a paged cache, more than
#: one, more than two.
STEM_TOKENS = (0, 3, 18, 37)

#: Sizes at which engines change what they do, for lengths and for batches.
EDGES = (16, 32, 48, 64, 96, 128, 256, 512, 1024)

#: The sizes of batches, up to the most that are tried.
BATCH_SIZES = (5, 9, 15, 17, 31, 33, 49, 55, 65, 129, 257, 300)

#: If the tokenizer has words, contexts are made of this text. On tokens that make no text, some
#: models amplify rounding: the rows of SmolLM2-135M, one context evaluated beside another, then
#: differ by 1e-3 in float32, and on text by 3e-6.
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
    has_words = max(STEM_TOKENS) <= len(ids) < 2 * len(TEXT.split())
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
        self.vocab_size = vocab_size
        text = words(tokenizer, vocab_size)
        #: Whether contexts are made of words.
        self.is_text = bool(text)
        named = [getattr(tokenizer, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
        special = {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
        #: The tokens that are not special.
        self.plain = [i for i in range(vocab_size) if i not in special]
        #: The special tokens.
        self.special = sorted(i for i in special if 0 <= i < vocab_size)
        #: Tokens that an engine may take for padding, or put before a text.
        marks = [i for i in named if isinstance(i, int) and i < vocab_size]
        self.marks = list(dict.fromkeys([*marks, 0]))
        #: The few tokens.
        self.tokens = list(dict.fromkeys(text[8:]))[:6] or [
            vocab_size * i // 7 for i in range(1, 7)
        ]
        #: The beginning of long contexts.
        self.stem = tuple(
            text or (vocab_size * (7 + 13 * i) // 601 % vocab_size for i in range(max(STEM_TOKENS)))
        )

    def lengths(self, most: int) -> list[int]:
        """Lengths from 1 to ``most``, around every edge."""
        around = {edge + off for edge in EDGES for off in (-1, 0, 1)}
        return sorted({length for length in {1, 2, 5, *around, most} if length <= most})

    def long(self, length: int, variant: int = 0) -> TokenIds:
        """A context of any length. Variants differ in their first token, and after it."""
        stem, first = self.stem, self.tokens[variant % len(self.tokens)]
        source = (
            (stem[(i + 5 * variant) % len(stem)] for i in range(1, length))
            if self.is_text
            else (
                self.vocab_size * (11 + 17 * i + 101 * variant) // 997 % self.vocab_size
                for i in range(1, length)
            )
        )
        return (first, *source)

    def many(self, count: int) -> list[TokenIds]:
        """Distinct short contexts of unequal lengths, from 2 tokens to 40."""
        tokens = self.tokens
        n = len(tokens)
        ends = [(tokens[i % n], tokens[i // n % n], tokens[i // n**2 % n]) for i in range(count)]
        found = [
            (*self.stem[: (i * 7) % 37], *end, *(tokens[1],) * (i // n**3))[: self.limit]
            for i, end in enumerate(ends)
        ]
        return list(dict.fromkeys(found))

    @property
    def spread(self) -> list[int]:
        """Tokens of text from all over the vocabulary, the last ones with them."""
        last = self.plain[-6:]
        step = max(1, len(self.plain) // 6)
        return list(dict.fromkeys([*self.plain[::step], *last]))

    def any(self, room_for: int = 4) -> SearchStrategy[TokenIds]:
        """One context that leaves room for that many tokens to follow."""
        longest = min(5, self.limit - room_for)
        fitting = [n for n in STEM_TOKENS if n + longest + room_for <= self.limit]
        stems = st.sampled_from([self.stem[:n] for n in fitting])
        return joined(stems, st.lists(st.sampled_from(self.tokens), min_size=1, max_size=longest))

    def several(self, most: int = 6) -> SearchStrategy[list[TokenIds]]:
        """Some contexts, perhaps with duplicates."""
        return st.lists(self.any(), min_size=2, max_size=most)

    def distinct(self, least: int = 2, most: int = 4) -> SearchStrategy[list[TokenIds]]:
        """Some contexts without duplicates."""
        return st.lists(self.any(), min_size=least, max_size=most, unique=True)

    def tails(self, most: int = 3) -> SearchStrategy[TokenIds]:
        """A few tokens to follow a context."""
        return joined(st.lists(st.sampled_from(self.tokens), min_size=1, max_size=most))


@st.composite
def joined(draw: st.DrawFn, *parts: SearchStrategy[Sequence[int]]) -> TokenIds:
    """Tokens of all parts. (A composite, because Hypothesis shows a ``map`` as a call of it.)"""
    return tuple(token for part in parts for token in draw(part))
