"""Tokenizers of the ``tokenizers`` library: Hugging Face's "fast" ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from genlm.core.errors import VocabularyError
from genlm.core.tokenization.decoder import Definition, decode_pieces

# Pre-tokenizers that drop the white space between words, and those that leave a mark for it.
_DROP_SPACES = {"BertPreTokenizer", "CharDelimiterSplit", "Whitespace", "WhitespaceSplit"}
_MARK_SPACES = {"ByteLevel", "Metaspace"}


def is_fast(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` is a ``tokenizers.Tokenizer`` or a Hugging Face tokenizer made of
    one."""
    return hasattr(_backend(tokenizer), "get_added_tokens_decoder")


def fast_token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token by id, from the tokenizer's model, decoder and added tokens.

    Added tokens are verbatim, except ordinary ones that are pieces of the model too: other text
    leads to these as well (Gemma lists its runs of spaces, ``▁▁``, among the added tokens), so they
    are what the decoder makes of the piece.

    Raises:
        VocabularyError: The tokenizer does not keep the bytes of the text.
    """
    backend = _backend(tokenizer)
    _check_keeps_spaces(backend)
    pieces, added = _pieces(backend), backend.get_added_tokens_decoder()
    token_bytes = decode_pieces(pieces, _decoder_definition(backend))
    for token_id, token in added.items():
        if token.special or pieces[token_id] != token.content:
            token_bytes[token_id] = token.content.encode()
    return token_bytes


def _pieces(backend: Any) -> list[str]:
    """The model's pieces by id, up to the largest id of any token; ``""`` for an id that is not the
    model's."""
    piece_of = backend.model.id_to_token
    pieces = list(map(piece_of, range(backend.get_vocab_size(with_added_tokens=False))))
    if None in pieces:  # ids have gaps, so the last ones are larger than the number of pieces
        ids = backend.get_vocab(with_added_tokens=False).values()
        pieces = [piece_of(token_id) or "" for token_id in range(max(ids) + 1)]
    beyond = max(backend.get_added_tokens_decoder(), default=-1) + 1 - len(pieces)
    return pieces + [""] * beyond


def _backend(tokenizer: Any) -> Any:
    return getattr(tokenizer, "backend_tokenizer", tokenizer)


def _definition(component: Any) -> Definition | None:
    """A tokenizer's component as the library serialises it; ``None`` for one written in Python.

    Read from the component's pickling state. ``Tokenizer.to_str`` would write out all merges, which
    takes longer than everything else together.
    """
    try:
        state = component.__getstate__()
    except Exception as error:  # the library raises nothing more specific
        if "cannot be serialized" not in str(error):
            raise
        return None
    definition: Definition = json.loads(state)
    return definition


def _decoder_definition(backend: Any) -> Definition:
    if backend.decoder is None:
        raise VocabularyError(
            "tokens have no byte strings: the tokenizer has no decoder, so decoding puts a space "
            "between any two tokens; set the decoder that belongs to its model"
        )
    definition = _definition(backend.decoder)
    if definition is None:
        raise VocabularyError(
            "tokens have no known byte strings: the tokenizer's decoder is Python code, not a "
            "definition; give the tokenizer a method token_bytes() that returns them"
        )
    return definition


def _check_keeps_spaces(backend: Any) -> None:
    """Refuse a tokenizer whose pieces do not tell what white space stood between them."""
    model = backend.model
    affixes = [
        affix
        for affix in ("continuing_subword_prefix", "end_of_word_suffix")
        if getattr(model, affix, None)
    ]
    if type(model).__name__ == "WordPiece":
        raise _drops_spaces("model WordPiece")
    if affixes:
        raise _drops_spaces(f"{affixes[0]} {getattr(model, affixes[0])!r}")
    kinds = set(_kinds(_definition(backend.pre_tokenizer))) if backend.pre_tokenizer else set()
    if kinds & _DROP_SPACES and not kinds & _MARK_SPACES:
        raise _drops_spaces(f"pre-tokenizer {min(kinds & _DROP_SPACES)}")


def _drops_spaces(culprit: str) -> VocabularyError:
    return VocabularyError(
        f"tokens have no byte strings: the tokenizer's {culprit} does not keep the white space of "
        "the text; use a byte-level or SentencePiece tokenizer"
    )


def _kinds(pre_tokenizer: Definition | None) -> Iterator[str]:
    if pre_tokenizer is not None:
        yield pre_tokenizer["type"]
        for part in pre_tokenizer.get("pretokenizers", ()):
            yield from _kinds(part)
