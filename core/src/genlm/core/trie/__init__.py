"""The trie over the symbols of a vocabulary."""

from typing import TYPE_CHECKING

from genlm.core.trie.async_trie import AsyncTokenCharacterTrie
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "TokenCharacterTrie"]

if TYPE_CHECKING:
    from genlm.core.next_bytes import BytePrefix as BytePrefix
    from genlm.core.next_bytes import next_bytes_logprob as next_bytes_logprob
else:

    def __getattr__(name):
        """``BytePrefix`` and ``next_bytes_logprob``, which were here before."""
        if name in ("BytePrefix", "next_bytes_logprob"):
            from genlm.core import next_bytes

            return getattr(next_bytes, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
