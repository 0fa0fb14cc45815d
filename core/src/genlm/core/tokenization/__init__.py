"""The tokens of a tokenizer, as bytes."""

from genlm.core.tokenization.token import Token
from genlm.core.tokenization.vocab import decode_vocab

__all__ = ["Token", "decode_vocab"]
