"""Which tokens of a tokenizer are special."""

from __future__ import annotations

from itertools import chain
from typing import Any

from genlm.core.tokenization.fast import special_added_ids
from genlm.core.tokenization.libraries import library_special_ids


def special_ids(tokenizer: Any) -> set[int]:
    """The ids of the special tokens: those that the tokenizer marks as special, or uses to begin or
    end a sequence."""
    candidates = chain(
        getattr(tokenizer, "all_special_ids", None) or (),
        (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")),
        special_added_ids(tokenizer),
        library_special_ids(tokenizer),
    )
    return {token_id for token_id in candidates if isinstance(token_id, int)}
