"""Contexts: token ids that are checked, hashed, and extended at the cost of what is new."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, overload

from attrs import frozen

from genlm.core.errors import InvalidQueryError

TokenIds = tuple[int, ...]

#: Tokens hashed at a time.
BLOCK = 128


@frozen
class HashedBlocks:
    """The hash of the full blocks at the beginning of a context.

    Attributes:
        end: How many tokens they have.
        value: Their hash: each block's together with that of the blocks before it.
    """

    end: int = 0
    value: int = 0

    def carried_on(self, token_ids: tuple[int, ...]) -> HashedBlocks:
        """The blocks of ``token_ids``, which begin with these."""
        end = len(token_ids) - len(token_ids) % BLOCK
        if end == self.end:
            return self
        value = self.value
        for start in range(self.end, end, BLOCK):
            value = hash((value, token_ids[start : start + BLOCK]))
        return HashedBlocks(end, value)

    def hash_of(self, token_ids: tuple[int, ...]) -> int:
        """The hash of ``token_ids``, which are these blocks and less than one block more."""
        return hash((self.value, token_ids[self.end :]))


NO_BLOCKS = HashedBlocks()


def hash_of(token_ids: tuple[int, ...]) -> int:
    """The hash of ``token_ids``."""
    if len(token_ids) < BLOCK:
        # Which is NO_BLOCKS.hash_of(token_ids), and the case that must be quick.
        return hash((0, token_ids))
    return NO_BLOCKS.carried_on(token_ids).hash_of(token_ids)


class Context(Sequence[int]):
    """Checked token ids, immutable, for every method that takes a context. Made by
    :meth:`AsyncLM.context`.

    A list of token ids is checked and hashed whole for every question. A context has been already,
    and one that extends it checks and hashes the new tokens alone; what still grows with the length
    is the copying of the ids.

    Attributes:
        token_ids: The ids.
        vocab_size: They are in ``range(vocab_size)``.
    """

    __slots__ = ("_blocks", "hash_value", "token_ids", "vocab_size")

    def __init__(
        self, token_ids: TokenIds, vocab_size: int, blocks: HashedBlocks = NO_BLOCKS
    ) -> None:
        self.token_ids = token_ids
        self.vocab_size = vocab_size
        self._blocks = blocks.carried_on(token_ids)
        self.hash_value = self._blocks.hash_of(token_ids)

    def extend(self, *token_ids: int) -> Context:
        """This context followed by some tokens, one at least.

        Raises:
            InvalidQueryError: one is no token id.
        """
        new = token_ids_of("extension", token_ids, self.vocab_size)
        return Context(self.token_ids + new, self.vocab_size, self._blocks)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        return self.token_ids[index]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __eq__(self, other: Any) -> bool:
        return self.token_ids == other.token_ids if isinstance(other, Context) else NotImplemented

    def __hash__(self) -> int:
        return self.hash_value

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.token_ids[:8])) + (", ..." if len(self) > 8 else "")
        return f"Context([{shown}], {len(self)} tokens)"


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
        raise InvalidQueryError(
            f"the {what} is empty; give at least one token id (a beginning-of-sequence token, say)"
        )
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
            f"the {what} is text ({token_ids!r:.40}); give token ids, as lm.tokenizer.encode(text) "
            "does"
        )
    if hasattr(token_ids, "tolist"):
        token_ids = token_ids.tolist()  # NumPy and torch: one call instead of one for each id
    if isinstance(token_ids, Set | Mapping):
        raise InvalidQueryError(
            f"the {what} is a {type(token_ids).__name__}, which has no order; give a sequence of "
            "token ids"
        )
    try:
        ids = tuple(token_ids)
    except TypeError as error:  # chained: it may be of the caller's own generator
        raise InvalidQueryError(
            f"the {what} is {token_ids!r:.40}; give a sequence of token ids"
        ) from error
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
