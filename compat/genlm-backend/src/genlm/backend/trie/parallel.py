"""The trie on a device."""

import genlm.core.trie
from genlm.backend.trie.base import TokenCharacterTrie as TokenCharacterTrie


class ParallelTokenCharacterTrie(genlm.core.trie.ParallelTokenCharacterTrie, TokenCharacterTrie):
    """The core's trie on a device, with the warning of 0.3 where it is given plain bytes."""
