"""The trie over the symbols of a vocabulary."""

from genlm.core.trie.async_trie import AsyncTokenCharacterTrie
from genlm.core.trie.next_bytes import BytePrefix, next_bytes_logprob
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = [
    "AsyncTokenCharacterTrie",
    "BytePrefix",
    "ParallelTokenCharacterTrie",
    "TokenCharacterTrie",
    "next_bytes_logprob",
]
