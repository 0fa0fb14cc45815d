"""Tokenizers written in Python, each family from the part of it that defines its tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from genlm.core.errors import VocabularyError
from genlm.core.tokenization.libraries import piece_bytes

_BYTE_ALPHABET = frozenset(map(chr, range(256)))


def slow_token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token by id. Added tokens are verbatim.

    :raises VocabularyError: the tokenizer is of no known family.
    """
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    pieces = {
        token_id: piece
        for piece, token_id in tokenizer.get_vocab().items()
        if token_id not in added
    }
    decode = _decoding(tokenizer, pieces)
    token_bytes = [b""] * (max([*pieces, *added], default=-1) + 1)
    for token_id, piece in pieces.items():
        token_bytes[token_id] = decode(piece)
    for token_id, token in added.items():
        token_bytes[token_id] = str(token).encode()
    return token_bytes


def _decoding(tokenizer: Any, pieces: Mapping[int, Any]) -> Callable[[Any], bytes]:
    """How the tokenizer's family spells bytes."""
    if all(isinstance(piece, bytes) for piece in pieces.values()):
        return bytes
    if hasattr(tokenizer, "sp_model") or hasattr(getattr(tokenizer, "tokenizer", None), "sp_model"):
        return piece_bytes
    if isinstance(getattr(tokenizer, "byte_decoder", None), Mapping):
        return _byte_decoder(tokenizer.byte_decoder)
    if (
        _BYTE_ALPHABET.issuperset(pieces.values())
        and tokenizer.convert_tokens_to_string(["Ã", "©"]) == "é"
    ):
        # ByT5: each token is the character whose code point is the byte.
        return _latin_1
    raise VocabularyError(
        f"tokens have no known byte strings: {type(tokenizer).__name__} is neither byte-level nor "
        "SentencePiece; "
        "give the tokenizer a method token_bytes() that returns them, or load its fast version"
    )


def _latin_1(piece: str) -> bytes:
    return piece.encode("latin-1")


def _byte_decoder(byte_of: Mapping[str, int]) -> Callable[[str], bytes]:
    """GPT-2 and its heirs: a byte for each character."""
    return lambda piece: bytes(map(byte_of.__getitem__, piece))
