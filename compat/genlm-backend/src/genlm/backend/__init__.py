"""The import paths of genlm-backend 0.3, served by genlm-core. Importing them imports no engine."""

# The package `cache` comes first, because it rejects an installation mixed with 0.3.
from genlm.backend import cache as cache  # isort: skip
from genlm.backend.llm import AsyncTransformer, AsyncVirtualLM, load_model_by_name
from genlm.backend.tokenization import Token, decode_vocab
from genlm.backend.trie import AsyncTokenCharacterTrie as AsyncTokenCharacterTrie
from genlm.backend.trie import ParallelTokenCharacterTrie, TokenCharacterTrie

__all__ = [
    "AsyncTokenCharacterTrie",
    "AsyncTransformer",
    "AsyncVirtualLM",
    "ParallelTokenCharacterTrie",
    "Token",
    "TokenCharacterTrie",
    "decode_vocab",
    "load_model_by_name",
]
