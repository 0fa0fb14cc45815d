"""The bytes of a vocabulary."""

from typing import Any

from genlm.backend._former import ONE_DECODER, former
from genlm.core import VocabularyError, decode_vocab

ByteVocabError = ByteDecoderError = VocabularyError


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """The bytes of every token, by id; see :func:`genlm.core.decode_vocab`."""
    return [token.byte_string for token in decode_vocab(tokenizer)[0]]


GONE = ("check_byte_decoder", "get_byte_tokens_from_byte_decoder", "get_byte_tokens_from_sp")
__getattr__ = former(__name__, dict.fromkeys(GONE, ONE_DECODER))
