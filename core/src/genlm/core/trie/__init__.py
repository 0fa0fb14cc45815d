"""The trie over the symbols of a vocabulary."""

from genlm.core.trie.async_trie import AsyncTokenCharacterTrie
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "TokenCharacterTrie"]
