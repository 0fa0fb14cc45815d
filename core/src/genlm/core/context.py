"""A context that grows: checked and hashed once, so that a question about it costs what is new in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

from genlm.core.hashing import NO_BLOCKS, HashedBlocks
from genlm.core.types import TokenIds
from genlm.core.validation import token_ids_of


class Context(Sequence[int]):
    """Checked token ids, immutable, for every method that takes a context. Made by :meth:`AsyncLM.context`.

    A list of token ids is checked and hashed whole for every question. A context has been already, and one that extends it
    checks and hashes the new tokens alone; what still grows with the length is the copying of the ids.

    Attributes:
        token_ids: The ids.
        vocab_size: They are in ``range(vocab_size)``.
    """

    __slots__ = ("_blocks", "hash_value", "token_ids", "vocab_size")

    def __init__(self, token_ids: TokenIds, vocab_size: int, blocks: HashedBlocks = NO_BLOCKS) -> None:
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
