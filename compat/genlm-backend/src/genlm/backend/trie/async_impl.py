"""The trie that batches."""

from typing import ClassVar

import genlm.core.trie
from genlm.backend.trie.base import TokenCharacterTrie as TokenCharacterTrie
from genlm.backend.trie.parallel import ParallelTokenCharacterTrie as ParallelTokenCharacterTrie


class AsyncTokenCharacterTrie(genlm.core.trie.AsyncTokenCharacterTrie):
    """The core's, over the tries of this package."""

    tries: ClassVar = {"parallel": ParallelTokenCharacterTrie, "sequential": TokenCharacterTrie}
