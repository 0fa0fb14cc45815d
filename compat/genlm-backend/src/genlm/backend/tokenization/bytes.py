"""The bytes of a vocabulary."""

from collections.abc import Mapping
from typing import Any

from genlm.backend._removed import ONE_DECODER, removed_names
from genlm.core import VocabularyError, decode_vocab

ByteVocabError = ByteDecoderError = VocabularyError


def get_byte_vocab(tokenizer: Any) -> list[bytes]:
    """The bytes of every token, by id; see :func:`genlm.core.decode_vocab`."""
    return [token.byte_string for token in decode_vocab(tokenizer)[0]]


def check_byte_decoder(tokenizer: Any, byte_decoder: Mapping[str, int]) -> None:
    """Check that a table of characters gives every token of a vocabulary its bytes.

    Args:
        tokenizer: A Hugging Face tokenizer.
        byte_decoder: The byte that each character of a token's name stands for.

    Raises:
        ByteDecoderError: A character has no byte, or a token other bytes than in a text.
    """
    right, added = get_byte_vocab(tokenizer), tokenizer.get_added_vocab()
    for token_id, name in sorted((i, name) for name, i in tokenizer.get_vocab().items()):
        known = all(character in byte_decoder for character in name)
        found = bytes(byte_decoder[character] for character in name) if known else None
        if name not in added and found != right[token_id]:
            raise ByteDecoderError(
                f"the byte decoder reads token {token_id}, {name!r}, as {found!r}; in a text it is "
                f"{right[token_id]!r}: decode_vocab(tokenizer) needs no such table"
            )


GONE = ("get_byte_tokens_from_byte_decoder", "get_byte_tokens_from_sp")
__getattr__ = removed_names(__name__, dict.fromkeys(GONE, ONE_DECODER))
