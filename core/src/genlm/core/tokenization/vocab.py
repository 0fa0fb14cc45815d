"""decode_vocab: from a tokenizer to the bytes and strings of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from numbers import Integral
from typing import Any

from genlm.core.errors import InvalidOptionError, VocabularyError
from genlm.core.tokenization.decoder import MAX_IDS, checked_size, undecodable
from genlm.core.tokenization.fast import fast_token_bytes, is_fast, special_added_ids
from genlm.core.tokenization.libraries import (
    library_special_ids,
    library_token_bytes,
    slow_token_bytes,
)
from genlm.core.tokenization.token import Token


def decode_vocab(
    tokenizer: Any, byte2str_fallback: str = "tokenizer"
) -> tuple[list[Token], list[str]]:
    """The tokens of a tokenizer as bytes, and as strings.

    The bytes of a token are the bytes that it adds to a text. The bytes of the tokens of a text,
    joined, are the text in UTF-8, except where the tokenizer's normalizer changes the text:
    SentencePiece, for instance, puts a space before it. The bytes follow from the tokenizer's own
    definition: model, decoder and added tokens. No text is encoded to find them. Special tokens
    have ``token.is_special``, and their literal text as bytes.

    Two losses are not errors: an added token may strip the white space next to it (``lstrip``,
    ``rstrip``), and a model may have no token for a character.

    Both lists have one more element than the largest id. An id without a token gives ``b""``.
    The strings are for display: several tokens may have the same string.

    Args:
        tokenizer: A Hugging Face tokenizer, fast or slow; a tokenizer of the libraries tokenizers,
            SentencePiece, tiktoken or mistral-common; or any object with a method ``token_bytes()
            -> Sequence[bytes]``, whose result is not verified.
        byte2str_fallback: What ``str_vocab`` holds for bytes that are not UTF-8. ``"tokenizer"``:
            the tokenizer's own name of the token (``convert_ids_to_tokens``), or ``"replace"`` if
            it has none. ``"latin1"``: the bytes read as Latin-1. ``"replace"``: U+FFFD.

    Returns:
        ``(byte_vocab, str_vocab)``, with ``byte_vocab[i].token_id == i``.

    Raises:
        InvalidOptionError: ``byte2str_fallback`` is not one of the values above.
        VocabularyError: The tokenizer loses bytes of the text (WordPiece does), or its family is
            not known, or it has special tokens only, or its ``token_bytes()`` returns something
            other than bytes.

    Examples:
        >>> from genlm.core.mock import ByteTokenizer
        >>> byte_vocab, str_vocab = decode_vocab(ByteTokenizer())
        >>> byte_vocab[97], str_vocab[257]
        (Token(token_id=97, byte_string=b'a'), '<|eos|>')
    """
    fallback = _fallback(tokenizer, byte2str_fallback)
    token_bytes = _token_bytes(tokenizer)
    if not token_bytes:
        raise VocabularyError(
            f"the vocabulary of {type(tokenizer).__name__} is empty; give a tokenizer that has "
            "tokens"
        )
    special = _special_ids(tokenizer).intersection(range(len(token_bytes)))
    if len(special) == len(token_bytes):
        names = ", ".join(token.decode(errors="replace") for token in token_bytes[:4])
        raise VocabularyError(
            f"the vocabulary of {type(tokenizer).__name__} has special tokens only ({names}): the "
            "folder that it was loaded from lacks its files; copy them there (tokenizer.json)"
        )
    return Token.vocabulary(token_bytes, special), [
        _to_string(i, token, fallback) for i, token in enumerate(token_bytes)
    ]


def _token_bytes(tokenizer: Any) -> Sequence[bytes]:
    if hasattr(tokenizer, "token_bytes"):
        tokens = list(islice(tokenizer.token_bytes(), MAX_IDS + 1))
        checked_size(len(tokens))
        return [_checked(i, token) for i, token in enumerate(tokens)]
    if is_fast(tokenizer):
        return fast_token_bytes(tokenizer)
    token_bytes = library_token_bytes(tokenizer)
    if token_bytes is not None:
        return token_bytes
    if not hasattr(tokenizer, "get_vocab"):
        raise undecodable(
            f"{type(tokenizer).__name__} is not a tokenizer of a known family: it has neither "
            "get_vocab nor token_bytes; give it a method token_bytes() that returns the bytes of "
            "every token"
        )
    return slow_token_bytes(tokenizer)


def _special_ids(tokenizer: Any) -> set[int]:
    """The ids of tokens that the tokenizer marks as special, or with which it begins or ends a
    sequence."""
    candidates = (
        *(getattr(tokenizer, "all_special_ids", None) or ()),
        *(getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id")),
        *special_added_ids(tokenizer),
        *library_special_ids(tokenizer),
    )
    return {int(token_id) for token_id in candidates if isinstance(token_id, Integral)}


def _checked(token_id: int, token: Any) -> bytes:
    if not isinstance(token, bytes | bytearray | memoryview):
        raise VocabularyError(
            f"token_bytes() gave {token!r:.40} for token {token_id}; give its bytes, or b'' if it "
            "has none"
        )
    return bytes(token)


def _to_string(token_id: int, token: bytes, fallback: Callable[[int, bytes], str]) -> str:
    try:
        return token.decode()
    except UnicodeDecodeError:
        return fallback(token_id, token)


def _fallback(tokenizer: Any, name: str) -> Callable[[int, bytes], str]:
    match name:
        case "latin1":
            return lambda _, token: token.decode("latin-1")
        case "tokenizer" if hasattr(tokenizer, "convert_ids_to_tokens"):
            return lambda token_id, _: str(tokenizer.convert_ids_to_tokens(token_id))
        case "tokenizer" | "replace":
            return lambda _, token: token.decode(errors="replace")
    raise InvalidOptionError(
        f"byte2str_fallback must be 'tokenizer', 'latin1' or 'replace'; got {name!r}"
    )
