"""Tokenizers that are not of the ``tokenizers`` library: SentencePiece's own, tiktoken's,
mistral-common's, and Hugging Face's that are written in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from genlm.core.tokenization.decoder import checked_size, named_byte, undecodable


def library_token_bytes(tokenizer: Any) -> list[bytes] | None:
    """The bytes of every token by id; ``None`` for a tokenizer of another library."""
    if hasattr(tokenizer, "get_piece_size"):
        size = checked_size(tokenizer.get_piece_size())
        return [_sentencepiece_bytes(tokenizer, i) for i in range(size)]
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return [_tiktoken_bytes(tokenizer, i) for i in range(checked_size(tokenizer.n_vocab))]
    mistral = _mistral_tokenizer(tokenizer)
    if mistral is None:
        return None
    return [_mistral_bytes(mistral, i) for i in range(checked_size(mistral.n_words))]


def library_special_ids(tokenizer: Any) -> list[int]:
    """The ids of the special tokens of a tokenizer of these libraries; of another, none."""
    if hasattr(tokenizer, "get_piece_size"):
        ids = range(tokenizer.get_piece_size())
        return [i for i in ids if tokenizer.is_control(i) or tokenizer.is_unknown(i)]
    if hasattr(tokenizer, "decode_single_token_bytes"):
        return [tokenizer.encode_single_token(name) for name in tokenizer.special_tokens_set]
    mistral = _mistral_tokenizer(tokenizer)
    return [] if mistral is None else list(filter(mistral.is_special, range(mistral.n_words)))


def piece_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: ``▁`` is a space, and ``<0x0A>`` names a byte."""
    byte = named_byte(piece)
    return piece.replace("▁", " ").encode() if byte is None else bytes([byte])


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
    """mistral-common's inner tokenizer: given itself, or inside that library's wrapper, or inside
    the wrapper of transformers around that."""
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


_BYTE_ALPHABET = frozenset(map(chr, range(256)))


def slow_token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token by id. Added tokens are verbatim.

    Raises:
        VocabularyError: The tokenizer's family is not known.
    """
    added: Mapping[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
    pieces = {
        token_id: piece
        for piece, token_id in tokenizer.get_vocab().items()
        if token_id not in added
    }
    decode = _decoding(tokenizer, pieces)
    token_bytes = [b""] * checked_size(max([*pieces, *added], default=-1) + 1)
    for token_id, piece in pieces.items():
        token_bytes[token_id] = decode(piece)
    for token_id, token in added.items():
        token_bytes[token_id] = str(token).encode()
    return token_bytes


def _decoding(tokenizer: Any, pieces: Mapping[int, Any]) -> Callable[[Any], bytes]:
    """How the tokenizer's family writes bytes."""
    if all(isinstance(piece, bytes) for piece in pieces.values()):
        return bytes
    if hasattr(tokenizer, "sp_model") or hasattr(getattr(tokenizer, "tokenizer", None), "sp_model"):
        return piece_bytes
    if isinstance(byte_of := getattr(tokenizer, "byte_decoder", None), Mapping):
        # GPT-2 and its successors write each byte as one character.
        return lambda piece: bytes(byte_of[character] for character in piece)
    if (
        _BYTE_ALPHABET.issuperset(pieces.values())
        and tokenizer.convert_tokens_to_string(["Ã", "©"]) == "é"
    ):
        # In ByT5, each token is the character whose code point is the byte.
        return lambda piece: str(piece).encode("latin-1")
    raise undecodable(
        f"{type(tokenizer).__name__} is neither byte-level nor SentencePiece; give the tokenizer a "
        "method token_bytes() that returns them, or load its fast version"
    )
