"""The trie that batches."""

from genlm.core.trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
from genlm.core.trie import ParallelTokenCharacterTrie as ParallelTokenCharacterTrie
from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
