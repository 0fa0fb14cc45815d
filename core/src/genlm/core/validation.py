"""Checking token ids, once, before anything else sees them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Set
from typing import Any

from genlm.core.errors import InvalidQueryError
from genlm.core.types import TokenIds


def token_ids_of(what: str, token_ids: Any, vocab_size: int) -> TokenIds:
    """The token ids as a tuple of plain ints in ``range(vocab_size)``.

    Args:
        what: What they are, for messages: ``"context"``.
        token_ids: Any iterable of integers; a NumPy array or tensor of integers too.
        vocab_size: The number of ids that the model has.

    Raises:
        InvalidQueryError: there are none, or one is no integer or out of range.
    """
    ids = _as_ints(what, token_ids)
    if not ids:
        raise InvalidQueryError(f"the {what} is empty; give at least one token id (a beginning-of-sequence token, say)")
    if min(ids) < 0 or max(ids) >= vocab_size:
        position, bad = next((i, t) for i, t in enumerate(ids) if not 0 <= t < vocab_size)
        raise InvalidQueryError(
            f"token id {_shown(bad)} at position {position} of the {what} is out of range; "
            f"the model has ids 0 to {vocab_size - 1}"
        )
    return ids


def _as_ints(what: str, token_ids: Any) -> TokenIds:
    if isinstance(token_ids, str | bytes | bytearray):
        raise InvalidQueryError(
            f"the {what} is text ({token_ids!r:.40}); give token ids, as lm.tokenizer.encode(text) does"
        )
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()  # NumPy and torch: one call instead of one for each id
    if isinstance(token_ids, Set | Mapping):
        raise InvalidQueryError(
            f"the {what} is a {type(token_ids).__name__}, which has no order; give a sequence of token ids"
        )
    try:
        ids = tuple(token_ids)
    except TypeError as error:  # chained: it may be of the caller's own generator
        raise InvalidQueryError(f"the {what} is {token_ids!r:.40}; give a sequence of token ids") from error
    if {int}.issuperset(map(type, ids)):
        return ids
    return tuple(_as_int(what, token_id, position) for position, token_id in enumerate(ids))


def _as_int(what: str, token_id: Any, position: int) -> int:
    try:
        if isinstance(token_id, bool):
            raise TypeError
        return operator.index(token_id)
    except TypeError:
        raise InvalidQueryError(
            f"{token_id!r} at position {position} of the {what} is no token id; give integers"
        ) from None


def _shown(token_id: int) -> str:
    """Python refuses to spell out an int of thousands of digits."""
    return str(token_id) if token_id.bit_length() <= 64 else f"of {token_id.bit_length()} bits"
