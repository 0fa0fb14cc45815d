"""The Hugging Face transformers backend of genlm-core. Importing it imports no engine."""

from genlm.hf.lm import AsyncTransformer

__all__ = ["AsyncTransformer"]
