"""Tokenizers of the ``tokenizers`` library: Hugging Face's "fast" ones."""

from __future__ import annotations

import itertools
import json
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from genlm.core.errors import VocabularyError
from genlm.core.tokenization.decoder import (
    Definition,
    can_be_in_text,
    checked_size,
    decode_pieces,
    guarded,
    steps,
    undecodable,
)

# A text that normalizers leave unchanged, except for its space. Byte-level decoders read the
# character U+00DF as another byte, unless a pre-tokenizer has spelled the text for them.
_PROBE = "a ж\u00df, c.1"
# Pre-tokenizers that remove the white space between words.
_REMOVE_SPACES = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}

# A character of every category of Unicode, and some more that patterns of tokenizers name.
_CHARACTERS = (
    "aA\u01c5\u02b0中\u0301\u0903\u20dd1\u2167²_-()«»!+$^© \u2028\u2029\x00\u200d\ue000\u0378"
    "s'/\t\n\r\u3000"
)

# How many characters are put into one text. A pattern may look at the rest of the text from each of
# them.
_TEXT_CHARACTERS = 256


def is_fast(tokenizer: Any) -> bool:
    """Whether ``tokenizer`` is a ``tokenizers.Tokenizer`` or a Hugging Face tokenizer made of
    one."""
    return hasattr(_backend(tokenizer), "get_added_tokens_decoder")


def fast_token_bytes(tokenizer: Any) -> list[bytes]:
    """The bytes of every token by id, from the tokenizer's model, decoder and added tokens.

    Added tokens are verbatim: they match the text as it is. An ordinary added token may also be a
    piece of the model. If the piece's bytes occur in texts, other text leads to it too, so it is
    what the decoder makes of the piece. (Gemma lists its runs of spaces, ``▁▁``, among the added
    tokens.) If they do not, only the verbatim match leads to it. (DeepSeek-Coder lists the pieces
    of the 13 bytes that UTF-8 does not use, such as ``ÿ``.)

    Raises:
        VocabularyError: The tokenizer does not keep the bytes of the text.
    """
    backend = _backend(tokenizer)
    decoder = _decoder_definition(backend)
    _check_keeps_text(backend, decoder)
    pieces, added = _pieces(backend), backend.get_added_tokens_decoder()
    token_bytes = decode_pieces(pieces, decoder)
    named = {backend.model.token_to_id(f"<0x{byte:02X}>"): bytes([byte]) for byte in range(256)}
    # SentencePiece's byte tokens; the decoder of a conversion may not read them.
    if None not in named:
        for token_id, byte in named.items():
            token_bytes[token_id] = byte
    for token_id, token in added.items():
        is_piece = not token.special and pieces[token_id] == token.content
        if not (is_piece and can_be_in_text(token_bytes[token_id])):
            token_bytes[token_id] = token.content.encode()
    return token_bytes


def special_added_ids(tokenizer: Any) -> list[int]:
    """The ids of the added tokens that are marked as special; also of a tokenizer in Python."""
    if is_fast(tokenizer):
        added = _backend(tokenizer).get_added_tokens_decoder()
    else:
        added = getattr(tokenizer, "added_tokens_decoder", {})
        if not isinstance(added, Mapping):
            # transformers' wrapper of mistral-common has a method of this name that only raises.
            # The tokenizer of mistral-common itself says which tokens are special.
            return []
    return [token_id for token_id, token in added.items() if getattr(token, "special", False)]


def _pieces(backend: Any) -> list[str]:
    """The model's pieces by id, up to the largest id of any token; ``""`` for an id that is not the
    model's."""
    piece_of = backend.model.id_to_token
    pieces = list(map(piece_of, range(backend.get_vocab_size(with_added_tokens=False))))
    if None in pieces:  # ids have gaps, so the last ids exceed the number of pieces
        ids = backend.get_vocab(with_added_tokens=False).values()
        pieces = [piece_of(token_id) or "" for token_id in range(checked_size(max(ids) + 1))]
    size = checked_size(max(backend.get_added_tokens_decoder(), default=-1) + 1)
    return pieces + [""] * (size - len(pieces))


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
        raise undecodable(
            "the tokenizer has no decoder, so decoding puts a space between any two tokens; set "
            "the decoder that belongs to its model"
        )
    definition = _definition(backend.decoder)
    if definition is None:
        raise undecodable(
            "the tokenizer's decoder is Python code, not a definition; give the tokenizer a method "
            "token_bytes() that returns them"
        )
    return definition


def _check_keeps_text(backend: Any, decoder: Definition) -> None:
    """Reject a tokenizer whose pieces do not determine the text from which they were made."""
    model = backend.model
    if type(model).__name__ == "WordPiece":
        raise _loses("model WordPiece", "the white space of the text")
    for affix in ("continuing_subword_prefix", "end_of_word_suffix"):
        if getattr(model, affix, None):
            raise _loses(f"{affix} {getattr(model, affix)!r}", "the white space of the text")
    prepends = any(step["type"] == "Prepend" for step in _steps(backend.normalizer))
    steps = _steps(backend.pre_tokenizer)
    _check_splits(steps, prepends)
    if steps:
        _check_covers(backend.pre_tokenizer, steps)
    _check_round_trip(backend, decoder)


def _check_splits(steps: Sequence[Definition], prepends: bool) -> None:
    """Reject a pre-tokenizer that removes text, or puts spaces where the text has none.

    It may remove white space if a step after that marks the start of every part: then white space
    is only normalised.

    Args:
        steps: The chain of steps.
        prepends: Whether the normalizer puts something before the text. A step that marks the first
            part may then mark several: all that begin where the text did.
    """
    # The step that removed white space, and the step that split a text elsewhere.
    removed_by = split_by = None
    spelled = False
    for step in steps:
        kind = step["type"]
        scheme = step.get("prepend_scheme")
        marks = scheme in ("always", "first") or step.get("add_prefix_space", False)
        if marks and split_by and (scheme != "first" or prepends):
            raise undecodable(
                f"the tokenizer's pre-tokenizer {kind} puts a space before every part that "
                f"{split_by} makes; set it to add none, or let it come first"
            )
        prepends = prepends or marks
        if scheme == "always":
            removed_by = None
        removes = step.get("behavior") == "Removed" and not step.get("invert")
        if kind == "CharDelimiterSplit" or removes:
            raise _loses(f"pre-tokenizer {kind}", "the text that it splits at")
        if kind in _REMOVE_SPACES and not spelled:
            removed_by = kind
        # After ByteLevel, the text has no white space left.
        spelled = spelled or kind == "ByteLevel"
        if kind not in ("Metaspace", "WhitespaceSplit"):
            split_by = kind
    if removed_by:
        raise _loses(f"pre-tokenizer {removed_by}", "the white space of the text")


def _check_covers(pre_tokenizer: Any, steps: Sequence[Definition]) -> None:
    """Reject a pre-tokenizer that loses a part of a text. It is tried on pairs of characters of
    every category, including equal ones. If a step keeps only what its pattern matches, it is tried
    on all texts: the pattern of GPT-4o, for instance, matches everything.

    Raises:
        VocabularyError: the pre-tokenizer loses text, fails, or takes too long.
    """
    kinds = ", ".join(step["type"] for step in steps)
    # If this step may remove white space, a later step marks every part.
    ignored = str.isspace if "WhitespaceSplit" in kinds else lambda _: False
    kept = [
        next(iter(step["pattern"].values())) for step in steps if step.get("behavior") == "Removed"
    ]
    work = "all characters" if kept else "a few texts"
    split = guarded("the tokenizer's pre-tokenizer", work, pre_tokenizer.pre_tokenize_str)
    for text in itertools.chain(kept, _texts()) if kept else _pairs():
        end = 0
        for start, stop in (*(place for _, place in split(text)), (len(text), len(text))):
            if start > end and not ignored(text[end:start]):
                lost = f"{text[end:start]!r:.80} of the text {text!r:.80}"
                raise _loses(f"pre-tokenizer {kinds}", lost)
            end = max(end, stop)


def _check_round_trip(backend: Any, decoder: Definition) -> None:
    """Reject a tokenizer whose decoder does not undo what its normalizer and pre-tokenizer do to a
    short text. The model is allowed to split this text into single characters."""
    text = _PROBE
    try:
        if backend.normalizer:
            text = backend.normalizer.normalize_str(text)
        if backend.pre_tokenizer:
            split = backend.pre_tokenizer.pre_tokenize_str
            parts = guarded("the tokenizer's pre-tokenizer", "a short text", split)(text)
            text = "".join(part for part, _ in parts)
    except VocabularyError:
        raise
    except Exception:  # raised by a component written in Python, which may need more than the text
        return
    back = b"".join(decode_pieces(list(text), decoder))
    if back not in (_PROBE.encode(), b" " + _PROBE.encode()):
        raise undecodable(
            f"the tokenizer's normalizer and pre-tokenizer make {text!r} of {_PROBE!r}, which its "
            f"decoder reads as {back!r}; use a byte-level or SentencePiece tokenizer whose "
            "components belong together"
        )


def _steps(component: Any) -> list[Definition]:
    """The chain of a component's steps, flat; empty for one written in Python."""
    definition = None if component is None else _definition(component)
    return [] if definition is None else steps(definition)


def _loses(culprit: str, lost: str) -> VocabularyError:
    return undecodable(
        f"the tokenizer's {culprit} does not keep {lost}; use a byte-level or SentencePiece "
        "tokenizer"
    )


def _pairs() -> Iterator[str]:
    """The pairs of characters with which texts begin and end."""
    return map("".join, itertools.product(_CHARACTERS, repeat=2))


def _texts() -> Iterator[str]:
    """The texts to try: pairs of characters alone, for the ends of a text; three characters in a
    row; and every character that Unicode assigns."""
    for pair in _pairs():
        yield pair
        yield "".join(pair + third for third in _CHARACTERS)
    every = "".join(
        character
        for character in map(chr, range(sys.maxunicode + 1))
        # The excluded categories have characters above.
        if unicodedata.category(character) not in ("Cn", "Co", "Cs")
    )
    for start in range(0, len(every), _TEXT_CHARACTERS):
        yield every[start : start + _TEXT_CHARACTERS]
