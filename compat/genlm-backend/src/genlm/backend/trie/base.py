"""The trie."""

from genlm.core import Token as Token
from genlm.core.trie import TokenCharacterTrie as TokenCharacterTrie
