"""The trie on a device."""

from genlm.core.trie import ParallelTokenCharacterTrie as ParallelTokenCharacterTrie
from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
