"""Clauses on the tokenizer: what the bytes of tokens say is what was written."""

from __future__ import annotations

import pytest

from genlm.core.conformance.compare import check
from genlm.core.conformance.subject import Subject

#: Printable ASCII, and every character of two bytes in UTF-8.
ASCII = "".join(map(chr, range(0x20, 0x7F)))
TWO_BYTES = "".join(map(chr, range(0x80, 0x800)))


class TokenizerClauses:
    """Text and bytes."""

    def test_bytes_of_text(self, live: Subject) -> None:
        """The bytes of ``encode(text)`` joined are the text, over printable ASCII and characters of
        two bytes. (Set ``text_is_normalised`` where the tokenizer changes text.)"""
        if live.suite.text_is_normalised:
            pytest.skip("this class says that the tokenizer changes text (text_is_normalised)")
        tokenizer, vocab = live.lm.tokenizer, live.lm.byte_vocab
        special = set(live.contexts.special)
        texts = [ASCII, ASCII[::-1], "a b  c", "1 + 1 = 2"]
        texts += [TWO_BYTES[i : i + 40] for i in range(0, len(TWO_BYTES), 40)]
        for text in texts:
            try:
                ids = [int(token_id) for token_id in tokenizer.encode(text)]
            except (AttributeError, TypeError, ValueError) as error:
                pytest.skip(f"the tokenizer does not encode text: {error}")
            if getattr(tokenizer, "unk_token_id", None) in ids:
                continue  # a character that the vocabulary does not have
            found = b"".join(vocab[i].byte_string for i in ids if i not in special)
            # Some put a space before the first word.
            check(
                found.removeprefix(b" ") == text.encode().removeprefix(b" "),
                f"the tokens of {text[:20]!r}... have the bytes {found[:40]!r}...",
            )
