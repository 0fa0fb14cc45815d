"""Which tokens of a tokenizer are special."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from genlm.core.tokenization.fast import special_added_ids
from genlm.core.tokenization.libraries import library_special_ids

_NAMED = ("bos_token_id", "eos_token_id")


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the special tokens: those that the tokenizer marks as special, or uses to begin or
    end a sequence."""
    return {token_id for token_id in _candidates(tokenizer) if isinstance(token_id, int)}


def _candidates(tokenizer: Any) -> Iterator[Any]:
    yield from getattr(tokenizer, "all_special_ids", None) or ()
    for name in _NAMED:
        yield getattr(tokenizer, name, None)
    yield from special_added_ids(tokenizer)
    yield from library_special_ids(tokenizer)
