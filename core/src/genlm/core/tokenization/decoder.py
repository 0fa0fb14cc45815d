"""The bytes that the decoder of a ``tokenizers`` tokenizer makes of each single piece.

A decoder is a chain of steps over the list of a text's pieces. The steps below do what those of the
``tokenizers`` library do, for one piece in the middle of a text, and before bytes are read as UTF-8
with losses: a byte that is not text by itself is a lone surrogate, as Python's ``surrogateescape``
writes it. A step whose effect on a piece depends on its neighbours is rejected.

Source: the library's Rust sources, ``decoders/``, ``pre_tokenizers/byte_level.rs`` and
``pre_tokenizers/metaspace.rs``.
"""

from __future__ import annotations

import codecs
import re
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from genlm.core.errors import VocabularyError

T = TypeVar("T")

_NO_BYTE = 256


def spelled_bytes(pieces: Sequence[str]) -> list[bytes]:
    """The bytes that each piece stands for; its UTF-8 if any of its characters is not in the
    alphabet.

    The ByteLevel decoder of ``tokenizers`` does the same. All pieces are read in one pass.

    Source: ``bytes_to_unicode`` in GPT-2's ``encoder.py``: a printable character for each byte.
    """
    text_of_all = "".join(pieces).encode("utf-32-le", "surrogatepass")
    characters = np.frombuffer(text_of_all, np.uint32)
    values = _byte_of_character()[np.minimum(characters, 0x144)]
    text = values.astype(np.uint8).tobytes()
    ends = np.cumsum([len(piece) for piece in pieces], dtype=np.int64)
    spelled = [text[start:end] for start, end in pairwise([0, *ends.tolist()])]
    for i in np.unique(
        np.searchsorted(ends, np.flatnonzero(values == _NO_BYTE), side="right")
    ).tolist():
        spelled[i] = pieces[i].encode(errors="surrogateescape")
    return spelled


def _byte_of_character() -> npt.NDArray[np.uint16]:
    """By code point, the byte that a character stands for.

    Printable Latin-1 stands for itself. The characters from U+0100 to U+0143 stand for the other
    bytes, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = np.full(0x145, _NO_BYTE, np.uint16)
    table[printable] = printable
    table[0x100:0x144] = sorted(set(range(256)) - set(printable))
    return table


Definition = Mapping[str, Any]

# The bytes that are not text by themselves.
BYTES = frozenset(bytes(range(0x80, 0x100)).decode(errors="surrogateescape"))
# The bytes that continue a character in UTF-8.
_CONTINUATION = bytes(range(0x80, 0xC0))
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_LOSSY = {
    "WordPiece": "puts a space between words whether or not the text had one",
    "BPEDecoder": "puts a space after each word whether or not the text had one",
    "CTC": "merges repeated tokens",
}


# The most ids of a vocabulary. The largest ones of today have about 300,000.
MAX_IDS = 1 << 22
# The most seconds that a regular expression may take for a whole vocabulary, or for all characters.
REGEX_SECONDS = 60.0


def undecodable(reason: str) -> VocabularyError:
    """The error for a tokenizer whose tokens have no bytes of their own, or whose bytes this module
    cannot determine."""
    return VocabularyError(f"Could not decode byte representation of the tokens: {reason}")


def checked_size(size: int) -> int:
    """``size`` itself, the number of ids of a vocabulary.

    Raises:
        VocabularyError: It is so large that the file must be wrong, or hostile.
    """
    if size > MAX_IDS:
        raise VocabularyError(
            f"the vocabulary reaches to token id {size - 1}, but ids must be below {MAX_IDS}; "
            "number its tokens without gaps"
        )
    return size


def guarded(culprit: str, work: str, call: Callable[..., T]) -> Callable[..., T]:
    """A call of the library that rejects the tokenizer if the library panics, as it does when an
    expression takes too many steps, or if all such calls take too long together.

    Args:
        culprit: The part of the tokenizer that is called, for messages.
        work: What all the calls are for.
        call: The library's.
    """
    deadline = time.monotonic() + REGEX_SECONDS

    def calling(*given: Any) -> T:
        if time.monotonic() > deadline:
            raise undecodable(
                f"{culprit} takes longer than {REGEX_SECONDS:g} s for {work}; use a simpler one"
            )
        try:
            return call(*given)
        except BaseException as error:  # a panic of the Rust library is not an ``Exception``
            if type(error).__name__ != "PanicException":
                raise
            raise undecodable(f"{culprit} fails: {error}; use a simpler one") from None

    return calling


def decode_pieces(pieces: Sequence[str], definition: Definition) -> list[bytes]:
    """The bytes that each piece adds to a text which it does not begin.

    Args:
        pieces: Pieces of the tokenizer's model.
        definition: The decoder, as ``tokenizers`` serialises it.

    Raises:
        VocabularyError: The decoder is unknown, or its result for a piece depends on the
            neighbouring pieces.
    """
    joined = False
    for step in (chain := steps(definition)):
        if step["type"] in _LOSSY:
            raise undecodable(
                f"the tokenizer's decoder {step['type']} "
                f"{_LOSSY[step['type']]}; use a byte-level or SentencePiece tokenizer"
            )
        if step["type"] == "ByteLevel" and not joined:
            spelled = spelled_bytes(pieces)
            if step is chain[-1]:
                return spelled
            pieces = [piece.decode(errors="surrogateescape") for piece in spelled]
        else:
            change = _change_of_text(step) if joined else _change_of_piece(step)
            pieces = [change(piece) for piece in pieces]
        joined = joined or step["type"] in ("Fuse", "ByteLevel")
    return [piece.encode(errors="surrogateescape") for piece in pieces]


def steps(definition: Definition) -> list[Definition]:
    """The chain of a component's steps, flat."""
    if definition["type"] != "Sequence":
        return [definition]
    parts = next(value for value in definition.values() if isinstance(value, list))
    return [step for part in parts for step in steps(part)]


def _change_of_piece(step: Definition) -> Callable[[str], str]:
    """The change that a decoding step makes to each piece, while pieces are still separate."""
    match step["type"]:
        case "ByteFallback":
            return _byte_or_piece
        case "Metaspace":
            return _replacing(step["replacement"], " ")
        case "Replace":
            return _replace(step)
        case "Strip":
            return _strip(step["content"], step["start"], step["stop"])
        case "Fuse":
            return str
        case unknown:
            raise undecodable(f"the tokenizer's decoder {unknown} is not supported")


def _change_of_text(step: Definition) -> Callable[[str], str]:
    """The change that a decoding step makes to the middle of a text, once the pieces are joined."""
    match step["type"]:
        case "Fuse" | "Strip" | "ByteFallback":
            # These decoders change the two ends of a text, or a text that is the name of one byte.
            return str
        case "Replace" if len(step["pattern"].get("String", "").encode()) == 1:
            return _replacing(step["pattern"]["String"], step["content"])
        case late:
            raise undecodable(
                f"the tokenizer's decoder {late} works on the joined text, across tokens"
            )


def named_byte(piece: str) -> int | None:
    """The byte that a piece such as ``<0x0A>`` names."""
    return int(piece[3:5], 16) if len(piece) == 6 and _BYTE_PIECE.fullmatch(piece) else None


def _byte_or_piece(piece: str) -> str:
    """The byte that the piece names."""
    byte = named_byte(piece)
    return piece if byte is None else bytes([byte]).decode(errors="surrogateescape")


def can_be_in_text(token: bytes) -> bool:
    """Whether any UTF-8 text contains these bytes."""
    beginning = len(token) - len(token.lstrip(_CONTINUATION))
    if beginning > 3:
        return False
    try:  # an incomplete character at the end is not an error
        codecs.getincrementaldecoder("utf-8")().decode(token[beginning:])
    except UnicodeDecodeError:
        return False
    return True


def _replacing(pattern: str, content: str) -> Callable[[str], str]:
    return lambda piece: piece.replace(pattern, content)


def _replace(step: Definition) -> Callable[[str], str]:
    if "String" in step["pattern"]:
        return _replacing(step["pattern"]["String"], step["content"])
    # The expression is in Oniguruma's dialect, which only the library itself reads correctly.
    from tokenizers import Regex
    from tokenizers.decoders import Replace

    pattern = step["pattern"]["Regex"]
    culprit = f"the decoder's regular expression {pattern!r:.80}"
    decode = Replace(Regex(pattern), step["content"]).decode
    replace: Callable[[list[str]], str] = guarded(culprit, "the vocabulary", decode)
    return lambda piece: piece if piece in BYTES else replace([piece])


def _strip(content: str, start: int, stop: int) -> Callable[[str], str]:
    """Takes at most ``start`` leading and ``stop`` trailing characters ``content``."""

    def strip(piece: str) -> str:
        leading = min(start, len(piece) - len(piece.lstrip(content)))
        piece = piece[leading:]
        trailing = min(stop, len(piece) - len(piece.rstrip(content)))
        return piece[: len(piece) - trailing]

    return strip
