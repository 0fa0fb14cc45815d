"""Hashes of token ids that can be carried on: one more token costs at most a block, however long the context is."""

from __future__ import annotations

from attrs import frozen

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
        return hash((0, token_ids))  # which is NO_BLOCKS.hash_of(token_ids), and the case that must be quick
    return NO_BLOCKS.carried_on(token_ids).hash_of(token_ids)
