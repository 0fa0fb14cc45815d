"""Whether a pre-tokenizer keeps texts, found out by what it does to them."""

from __future__ import annotations

import itertools
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

from genlm.core.tokenization.decoder import Definition, guarded

#: A character of every category of Unicode, and some that patterns of tokenizers name.
CHARACTERS = (
    "aA\u01c5\u02b0中\u0301\u0903\u20dd1\u2167²_-()«»!+$^© \u2028\u2029\x00\u200d\ue000\u0378"
    "s'/\t\n\r\u3000"
)

#: How many characters stand in one text: a pattern may look at the rest from each of them.
LENGTH = 256


def matches_all(step: Definition) -> bool:
    """Whether the pattern of a ``Split`` that keeps only what it matches keeps every text.

    Args:
        step: The step, as ``tokenizers`` serialises it.

    Raises:
        VocabularyError: the pattern fails, or takes too long.
    """
    from tokenizers import Regex, pre_tokenizers

    (kind, pattern), *_ = step["pattern"].items()
    compiled = Regex(pattern) if kind == "Regex" else pattern
    culprit = f"the pattern {pattern!r:.80} of the tokenizer's pre-tokenizer"
    removing = pre_tokenizers.Split(compiled, "removed", invert=True)
    split = guarded(culprit, "all characters", removing.pre_tokenize_str)
    every = itertools.chain([pattern], texts())
    return all("".join(part for part, _ in split(text)) == text for text in every)


def lost(pre_tokenizer: Any, ignored: Callable[[str], bool]) -> tuple[str, str] | None:
    """A text of two characters, of every category, runs included, and what of it is in no part;
    ``None`` where all of every such text is in some part, or ``ignored``.

    Raises:
        VocabularyError: the pre-tokenizer fails, or takes too long.
    """
    split = guarded("the tokenizer's pre-tokenizer", "a few texts", pre_tokenizer.pre_tokenize_str)
    for text in pairs():
        end, parts = 0, split(text)
        for start, stop in (*(place for _, place in parts), (len(text), len(text))):
            if start > end and not ignored(text[end:start]):
                return text, text[end:start]
            end = max(end, stop)
    return None


def pairs() -> Iterator[str]:
    """What begins and ends a text."""
    return map("".join, itertools.product(CHARACTERS, repeat=2))


def texts() -> Iterator[str]:
    """Pairs of characters alone, for what begins and ends a text; three in a row; and every
    character that Unicode assigns."""
    for pair in pairs():
        yield pair
        yield "".join(pair + third for third in CHARACTERS)
    every = "".join(
        character
        for character in map(chr, range(sys.maxunicode + 1))
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")  # those have one above
    )
    for start in range(0, len(every), LENGTH):
        yield every[start : start + LENGTH]
