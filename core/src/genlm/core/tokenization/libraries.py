"""Tokenizers that are not Hugging Face's: SentencePiece's own, tiktoken's and mistral-common's."""

from __future__ import annotations

import re
from typing import Any

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def library_token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token by id; ``None`` if ``tokenizer`` is of none of these libraries."""
    if hasattr(tokenizer, "get_piece_size"):
        return [_sentencepiece_bytes(tokenizer, i) for i in range(tokenizer.get_piece_size())]
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return [_tiktoken_bytes(tokenizer, i) for i in range(tokenizer.n_vocab)]
    mistral = _mistral_tokenizer(tokenizer)
    return None if mistral is None else [_mistral_bytes(mistral, i) for i in range(mistral.n_words)]


def piece_bytes(piece: str) -> bytes:
    """What a SentencePiece piece stands for: ``▁`` is a space, and ``<0x0A>`` names a byte."""
    return (
        bytes([int(piece[3:5], 16)])
        if _BYTE_PIECE.fullmatch(piece)
        else piece.replace("▁", " ").encode()
    )


def _sentencepiece_bytes(model: Any, piece_id: int) -> bytes:
    piece: str = model.id_to_piece(piece_id)
    return piece.encode() if model.is_control(piece_id) else piece_bytes(piece)


def _tiktoken_bytes(encoding: Any, token_id: int) -> bytes:
    try:
        token: bytes = encoding.decode_single_token_bytes(token_id)
    except KeyError:  # no token has this id
        return b""
    return token


def _mistral_tokenizer(tokenizer: Any) -> Any:
    """mistral-common's tokenizer proper: bare, in that library's cover, or in the cover of
    transformers around that."""
    for _ in range(3):
        if all(hasattr(tokenizer, name) for name in ("n_words", "id_to_piece", "is_special")):
            return tokenizer
        tokenizer = getattr(tokenizer, "instruct_tokenizer", tokenizer)
        tokenizer = getattr(tokenizer, "tokenizer", None)
    return None


def _mistral_bytes(tokenizer: Any, token_id: int) -> bytes:
    piece: str = tokenizer.id_to_piece(token_id)
    if tokenizer.is_special(token_id):
        return piece.encode()
    if hasattr(tokenizer, "id_to_byte_piece"):  # Tekken
        token: bytes = tokenizer.id_to_byte_piece(token_id)
        return token
    return piece_bytes(piece)
