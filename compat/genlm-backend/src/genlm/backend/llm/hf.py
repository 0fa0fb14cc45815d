"""The Hugging Face backend."""

from genlm.backend._former import ADAPTERS, former
from genlm.backend._former import TokenTrie as TokenTrie
from genlm.core import AsyncLM as AsyncLM
from genlm.core import Query as Query
from genlm.hf import AsyncTransformer as AsyncTransformer

__getattr__ = former(__name__, ADAPTERS)
