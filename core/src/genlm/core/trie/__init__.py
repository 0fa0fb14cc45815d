"""The trie over the symbols of a vocabulary."""

from typing import Any

from genlm.core.trie.async_trie import AsyncTokenCharacterTrie
from genlm.core.trie.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = ["AsyncTokenCharacterTrie", "ParallelTokenCharacterTrie", "TokenCharacterTrie"]


def __getattr__(name: str) -> Any:
    """``BytePrefix`` and ``next_bytes_logprob``, which were here before."""
    if name in ("BytePrefix", "next_bytes_logprob"):
        from genlm.core import next_bytes

        return getattr(next_bytes, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
