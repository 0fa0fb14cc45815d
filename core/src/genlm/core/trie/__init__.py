"""The trie over a vocabulary's letters."""

from genlm.core.trie.async_trie import AsyncTokenCharacterTrie
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "TokenCharacterTrie"]
