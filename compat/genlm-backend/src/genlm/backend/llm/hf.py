"""The Hugging Face backend."""

from genlm.backend._removed import ADAPTERS, removed_names
from genlm.backend._removed import TokenTrie as TokenTrie
from genlm.core import AsyncLM as AsyncLM
from genlm.core import Query as Query
from genlm.hf import AsyncTransformer as AsyncTransformer

__getattr__ = removed_names(__name__, ADAPTERS)
